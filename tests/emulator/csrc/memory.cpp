// Memory of the device, as torch's caching allocator hands it out, and page-locked memory.
#include "fake.h"
#include <cstdlib>

constexpr size_t GRANULE = 512;                // to which the caching allocator rounds
constexpr size_t QUARANTINE_BYTES = 64u << 20;
static const char* FORMER = "the former owner of this memory (allocated here)";

void add_region_locked(uintptr_t base, size_t bytes, bool device, int stream, uint64_t at) {
  Region r{base, bytes, device, stream};
  if (at) {
    Marks& m = r.of(stream);
    std::fill(m.written.begin(), m.written.end(), at);
    std::fill(m.written_by.begin(), m.written_by.end(), D.id(FORMER));
  }
  D.regions[base] = std::move(r);
}

// What the next owner of freed memory comes after. torch's allocator hands it out in the order of the
// stream it was allocated on, once an event is done that it records at once on each recorded stream:
// both cover what these streams have waited for, too.
static Clock reuse_comes_after(const Region& r) {
  Clock found = D.host;
  auto add = [&](int s) {
    found.merge(D.stream(s));
    found.set(s, D.clock.of(s));
  };
  add(r.stream);
  for (int s : r.recorded) add(s);
  return found;
}

// Note the first access of a stream that is not over in `done`. What a stream of the program's own
// allocated is in order with the program's others when it joins them.
static void find_users(const Region& r, const Clock& done, const std::string& kind,
                       const std::string& now) {
  for (int t = 0; t < (int)r.marks.size(); t++) {
    const Marks& m = r.marks[t];
    if (!m.used() || (r.stream != 0 && !D.lanes.count(t))) continue;
    for (size_t i = 0; i < r.lines(); i++)
      if (m.last(i) > done.of(t)) {
        find_locked(kind, now, who_locked(t) + " " + D.names[m.last_by(i)]);
        return;
      }
  }
}

void* take_device(size_t n) {
  size_t size = (n + GRANULE - 1) / GRANULE * GRANULE;
  Lock lock(D.m);
  if (D.allocated + size > D.hbm_bytes) return nullptr;
  void* p = nullptr;
  if (posix_memalign(&p, GRANULE, size)) return nullptr;
  memset(p, 0xFF, size);
  D.allocated += size;
  D.peak = std::max(D.peak, D.allocated);
  // The caching allocator hands out what kernels that this stream queued before may still use.
  add_region_locked((uintptr_t)p, size, true, current_stream, D.on ? D.clock.of(current_stream) : 0);
  return p;
}

static void give_back_locked(void* p) {
  auto it = D.regions.find((uintptr_t)p);
  if (it == D.regions.end()) return;
  Region& r = it->second;
  if (r.seen_by_lane && D.on)
    find_users(r, reuse_comes_after(r), "given back to the allocator while a lane uses it",
               "free (" + who_locked(r.stream) + "'s memory)");
  size_t n = r.bytes;
  D.allocated -= n;
  D.regions.erase(it);
  memset(p, 0xFF, n);
  D.quarantine.push_back({p, n});
  D.quarantined += n;
  while (D.quarantined > QUARANTINE_BYTES) {
    auto [oldest, bytes] = D.quarantine.front();
    D.quarantine.pop_front();
    D.quarantined -= bytes;
    free(oldest);
  }
}

void free_device(void* p) {
  if (!p) return;
  { Lock lock(D.m); give_back_locked(p); }
  take_stacks();
}

void record_stream(uintptr_t p, int s) {
  Lock lock(D.m);
  if (Region* r = D.find(p)) r->recorded.insert(s);
}

bool pin(uintptr_t p, size_t n) {
  Lock lock(D.m);
  if (D.find(p)) return false;
  add_region_locked(p, n, false, 0, 0);
  return true;
}

bool is_torn_locked(uintptr_t lo, size_t n) {
  auto next = D.regions.upper_bound(lo);
  for (; next != D.regions.end() && next->first < lo + n; ++next)
    if (!next->second.device) return true;
  Region* first = D.find(lo);
  return first && !first->device && first->base + first->bytes < lo + n;
}

bool unpin(uintptr_t p) {
  bool found;
  {
    Lock lock(D.m);
    auto it = D.regions.find(p);
    found = it != D.regions.end();
    if (found) {
      find_users(it->second, D.host, "page-locked memory is unregistered while a copy uses it",
                 "cudaHostUnregister");
      D.regions.erase(it);
    }
  }
  take_stacks();
  return found;
}

size_t pinned_bytes() {
  Lock lock(D.m);
  size_t n = 0;
  for (auto& [base, r] : D.regions) if (!r.device) n += r.bytes;
  return n;
}
