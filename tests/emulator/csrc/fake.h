// An emulated CUDA device on torch's PrivateUse1: memory is RAM, kernels are the CPU's, streams and
// events are vector clocks. Every access is checked against a shadow of 32-byte lines.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

constexpr size_t LINE = 32;  // bytes of a shadow line

// How far each stream has come, as far as the owner of the clock knows; it grows with the streams.
struct Clock {
  std::vector<uint64_t> at;
  uint64_t of(int stream) const { return stream < (int)at.size() ? at[stream] : 0; }
  void set(int stream, uint64_t value);
  void merge(const Clock& other);
  bool covers(const Clock& other) const;
};

// The last read and write of every line by one stream: the stream's clock, and the operation.
struct Marks {
  std::vector<uint32_t> read, written;
  std::vector<uint16_t> read_by, written_by;
  bool used() const { return !read.empty(); }
  void use(size_t lines);
  uint64_t last(size_t line) const { return std::max(read[line], written[line]); }
  uint16_t last_by(size_t line) const;
};

struct Region {
  uintptr_t base;
  size_t bytes;
  bool device;  // else page-locked host memory
  int stream;   // which it was allocated on
  bool seen_by_lane = false;
  std::unordered_set<int> recorded = {};  // streams that its reuse waits for (record_stream)
  std::vector<Marks> marks = {};  // of each stream that touched it
  size_t lines() const { return (bytes + LINE - 1) / LINE; }
  size_t first(uintptr_t lo) const { return (lo - base) / LINE; }
  size_t last(uintptr_t lo, size_t n) const { return std::min((lo + n - 1 - base) / LINE, lines() - 1); }
  Marks& of(int stream);
};

struct Finding { std::string kind, now, then; int64_t count; std::string stack; };
struct HostAccess { uintptr_t lo, hi; bool write; std::string op; };
struct Event { Clock at{}; bool recorded = false; };

struct Detector {
  std::mutex m;
  bool on = false;
  Clock clock{}, host{};           // operations of each stream; what the host has waited for
  std::vector<Clock> streams{};    // what each stream is ordered after
  std::map<int, std::string> lanes{};
  std::map<uintptr_t, Region> regions{};
  std::map<std::string, Finding> findings{};
  std::vector<std::string> names{"?"};
  std::unordered_map<std::string, int> ids{};
  std::unordered_map<int64_t, HostAccess> host_accesses{};  // under way, on any thread
  int64_t next_access = 0;
  size_t allocated = 0, peak = 0, n_ops = 0;
  bool refused = false;  // a call of the runtime failed: the next launch says so
  size_t hbm_bytes = SIZE_MAX, workspace_bytes = 0;
  std::unordered_map<std::string, int64_t> copies{};
  std::deque<std::pair<void*, size_t>> quarantine{};  // freed: NaN for a while, so that late reads show
  size_t quarantined = 0;

  int id(const std::string& name);
  Region* find(uintptr_t p);
  Clock& stream(int s);
};

extern Detector D;
extern thread_local int current_stream;
extern thread_local int inside;  // the emulator itself computes
extern thread_local int label;   // the name of what Python says is going on, or 0
struct Inside { Inside() { inside++; } ~Inside() { inside--; } };
using Lock = std::lock_guard<std::mutex>;

// Those named _locked are called with D.m held.
void find_locked(const std::string& kind, const std::string& now, const std::string& then);
void take_stacks();  // of what this thread has just found; with D.m free
uint64_t begin_op_locked(int s);
std::string who_locked(int s);
std::string labelled_locked(const std::string& name);
void touch_locked(uintptr_t lo, size_t bytes, int s, bool write, int op);
void host_touch_locked(uintptr_t lo, size_t bytes, bool write, const std::string& op);
int64_t host_begins_locked(uintptr_t lo, size_t bytes, bool write, const std::string& op);
void add_region_locked(uintptr_t base, size_t bytes, bool device, int stream, uint64_t at);
void host_waits_locked(int s);
bool is_torn_locked(uintptr_t lo, size_t n);  // a part of this host memory is page-locked

void* take_device(size_t n);  // null: HBM is full
void free_device(void* p);
void record_stream(uintptr_t p, int s);
void tell_refusal();  // throws, once
bool pin(uintptr_t p, size_t n);
bool unpin(uintptr_t p);
size_t pinned_bytes();
void record_event(Event& e, int s);
void wait_event(int s, const Event& e);
bool is_known(const Event& e);
void host_knows(const Event& e);
bool host_waits_for_stream(int s);  // whether it had to
void host_waits_for_stream(int s, const std::string& what);
void host_waits_for_all();
void forget_findings();

std::string python_stack();
void stall(const std::string& what);  // the host waits for the device here
void register_with_torch();
