// Clocks, and which accesses no clock orders.
#include "fake.h"

Detector D;
thread_local int current_stream = 0;
thread_local int label = 0;
thread_local int inside = 0;

void Clock::set(int stream, uint64_t value) {
  if (stream >= (int)at.size()) at.resize(stream + 1);
  at[stream] = value;
}

void Clock::merge(const Clock& other) {
  if (at.size() < other.at.size()) at.resize(other.at.size());
  for (size_t i = 0; i < other.at.size(); i++) at[i] = std::max(at[i], other.at[i]);
}

bool Clock::covers(const Clock& other) const {
  for (size_t i = 0; i < other.at.size(); i++)
    if (other.at[i] > of(i)) return false;
  return true;
}

void Marks::use(size_t lines) {
  read.resize(lines); written.resize(lines);
  read_by.resize(lines); written_by.resize(lines);
}

uint16_t Marks::last_by(size_t line) const {
  return written[line] >= read[line] ? written_by[line] : read_by[line];
}

Marks& Region::of(int stream) {
  if (stream >= (int)marks.size()) marks.resize(stream + 1);
  if (!marks[stream].used()) marks[stream].use(lines());
  return marks[stream];
}

int Detector::id(const std::string& name) {
  auto it = ids.find(name);
  if (it != ids.end()) return it->second;
  names.push_back(name);
  return ids[name] = names.size() - 1;
}

Region* Detector::find(uintptr_t p) {
  auto it = regions.upper_bound(p);
  if (it == regions.begin()) return nullptr;
  --it;
  return p < it->second.base + it->second.bytes ? &it->second : nullptr;
}

Clock& Detector::stream(int s) {
  if (s >= (int)streams.size()) streams.resize(s + 1);
  return streams[s];
}

// -- findings --------------------------------------------------------------------------------------

static thread_local std::vector<std::string> fresh;

void find_locked(const std::string& kind, const std::string& now, const std::string& then) {
  auto key = kind + "|" + now + "|" + then;
  auto it = D.findings.find(key);
  if (it != D.findings.end()) { it->second.count++; return; }
  D.findings[key] = Finding{kind, now, then, 1, ""};
  fresh.push_back(key);
}

void take_stacks() {
  if (fresh.empty()) return;
  auto mine = std::move(fresh);
  fresh.clear();
  auto stack = python_stack();
  Lock lock(D.m);
  for (auto& key : mine) D.findings[key].stack = stack;
}

void forget_findings() {  // and take all that was queued for done
  Lock lock(D.m);
  D.findings.clear(); D.copies.clear(); D.n_ops = 0;
  D.host.merge(D.clock);
  for (auto& stream : D.streams) stream.merge(D.clock);
}

std::string who_locked(int s) {
  if (s == 0) return "compute";
  auto it = D.lanes.find(s);
  return it != D.lanes.end() ? it->second : "stream " + std::to_string(s);
}

std::string labelled_locked(const std::string& name) {
  return label ? name + " [" + D.names[label] + "]" : name;
}

// -- order -----------------------------------------------------------------------------------------

uint64_t begin_op_locked(int s) {
  auto& mine = D.stream(s);
  mine.merge(D.host);
  D.clock.set(s, D.clock.of(s) + 1);
  mine.set(s, D.clock.of(s));
  D.n_ops++;
  return D.clock.of(s);
}

// Whether an access of another stream is not ordered before stream s; it is noted.
static bool conflicts(const Region& r, size_t line, int s, bool write, int op) {
  const Clock& mine = D.stream(s);
  std::string where = r.device ? " on the device" : " in page-locked memory";
  for (int t = 0; t < (int)r.marks.size(); t++) {
    const Marks& m = r.marks[t];
    if (t == s || !m.used()) continue;
    auto now = [&] { return who_locked(s) + " " + D.names[op]; };
    if (m.written[line] > mine.of(t)) {
      find_locked((write ? "write after write" : "read before ready") + where, now(),
                  who_locked(t) + " " + D.names[m.written_by[line]]);
      return true;
    }
    if (write && m.read[line] > mine.of(t)) {
      find_locked("overwritten while it is read" + where, now(),
                  who_locked(t) + " " + D.names[m.read_by[line]]);
      return true;
    }
  }
  return false;
}

void touch_locked(uintptr_t lo, size_t bytes, int s, bool write, int op) {
  Region* r = bytes ? D.find(lo) : nullptr;
  if (!r) return;
  if (D.lanes.count(s)) r->seen_by_lane = true;
  Marks& mine = r->of(s);
  uint64_t now = D.clock.of(s);
  bool told = false;
  for (size_t i = r->first(lo), end = r->last(lo, bytes); i <= end; i++) {
    told = told || conflicts(*r, i, s, write, op);
    if (write) { mine.written[i] = now; mine.written_by[i] = op; }
    else { mine.read[i] = now; mine.read_by[i] = op; }
  }
  if (r->device) return;
  for (auto& [key, a] : D.host_accesses)
    if (a.lo < lo + bytes && lo < a.hi && (write || a.write))
      find_locked("a host thread is at bytes that a lane is asked to copy",
                  who_locked(s) + " " + D.names[op], "host " + a.op);
}

void host_touch_locked(uintptr_t lo, size_t bytes, bool write, const std::string& op) {
  Region* r = bytes ? D.find(lo) : nullptr;
  if (!r || r->device) return;
  for (size_t i = r->first(lo), end = r->last(lo, bytes); i <= end; i++)
    for (int t = 0; t < (int)r->marks.size(); t++) {
      const Marks& m = r->marks[t];
      if (!m.used()) continue;
      if (m.written[i] > D.host.of(t)) {
        find_locked("host touches what a copy has yet to write", "host " + op,
                    who_locked(t) + " " + D.names[m.written_by[i]]);
        return;
      }
      if (write && m.read[i] > D.host.of(t)) {
        find_locked("host overwrites what a copy has yet to read", "host " + op,
                    who_locked(t) + " " + D.names[m.read_by[i]]);
        return;
      }
    }
}

int64_t host_begins_locked(uintptr_t lo, size_t bytes, bool write, const std::string& op) {
  if (D.on) host_touch_locked(lo, bytes, write, op);
  D.host_accesses[D.next_access] = HostAccess{lo, lo + bytes, write, op};
  return D.next_access++;
}

void record_event(Event& e, int s) {
  Lock lock(D.m);
  D.stream(s).merge(D.host);
  e.at = D.stream(s);
  e.at.set(s, D.clock.of(s));
  e.recorded = true;
}

void wait_event(int s, const Event& e) {
  Lock lock(D.m);
  if (e.recorded) D.stream(s).merge(e.at);
}

bool is_known(const Event& e) {
  Lock lock(D.m);
  return !e.recorded || D.host.covers(e.at);
}

void host_knows(const Event& e) {
  Lock lock(D.m);
  D.host.merge(e.at);
}

void host_waits_locked(int s) {
  D.host.merge(D.stream(s));
  D.host.set(s, std::max(D.host.of(s), D.clock.of(s)));
}

bool host_waits_for_stream(int s) {
  Lock lock(D.m);
  bool had_to = D.host.of(s) < D.clock.of(s);
  host_waits_locked(s);
  return had_to;
}

void host_waits_for_stream(int s, const std::string& what) {
  if (host_waits_for_stream(s)) stall(what);
}

void host_waits_for_all() {
  Lock lock(D.m);
  for (int s = 0; s < (int)D.streams.size(); s++) host_waits_locked(s);
}
