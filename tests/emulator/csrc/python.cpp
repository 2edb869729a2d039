// The door for Python: tests/emulator/fake.py and its modules.
#include "fake.h"
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
namespace py = pybind11;

static py::object* stack_of = nullptr;  // never freed: torch's threads outlive the interpreter
static py::object* stalled = nullptr;

std::string python_stack() {
  if (!Py_IsInitialized() || !stack_of) return "";
  py::gil_scoped_acquire gil;
  return (*stack_of)().cast<std::string>();
}

void stall(const std::string& what) {
  if (!D.on || !Py_IsInitialized() || !stalled) return;
  py::gil_scoped_acquire gil;
  (*stalled)(what);
}

static std::vector<Finding> findings() {
  Lock lock(D.m);
  std::vector<Finding> all;
  for (auto& [key, finding] : D.findings) all.push_back(finding);
  return all;
}

static int set_label(const std::string& name) {
  Lock lock(D.m);
  int old = label;
  label = name.empty() ? 0 : D.id(name);
  return old;
}

static int64_t host_begin(uintptr_t lo, size_t n, bool write, const std::string& op) {
  int64_t key;
  { Lock lock(D.m); key = host_begins_locked(lo, n, write, op); }
  take_stacks();
  return key;
}

using Access = std::tuple<uintptr_t, size_t, bool>;  // first byte, bytes, whether they are written

// One operation of a stream, of which torch is not told.
static void work_on(int s, const std::vector<Access>& accesses, const std::string& name) {
  {
    Lock lock(D.m);
    begin_op_locked(s);
    if (D.on)
      for (auto& [lo, n, write] : accesses) touch_locked(lo, n, s, write, D.id(name));
  }
  take_stacks();
}

PYBIND11_MODULE(fake_cuda_ext, m) {
  m.def("init", [](py::object stack, py::object stall) {
    stack_of = new py::object(stack);
    stalled = new py::object(stall);
    register_with_torch();
  });
  m.def("watch", [](bool on) { Lock lock(D.m); D.on = on; });
  m.def("reset", &forget_findings);
  py::class_<Finding>(m, "Finding")
      .def_readonly("kind", &Finding::kind).def_readonly("now", &Finding::now)
      .def_readonly("then", &Finding::then).def_readonly("count", &Finding::count)
      .def_readonly("stack", &Finding::stack);
  m.def("findings", &findings);
  m.def("copies", [] { Lock lock(D.m); return D.copies; });
  m.def("n_ops", [] { Lock lock(D.m); return D.n_ops; });

  m.def("set_stream", [](int s) { return std::exchange(current_stream, s); });
  m.def("get_stream", [] { return current_stream; });
  m.def("name_stream", [](int s, const std::string& name) {  // "": it is no lane, or no longer one
    Lock lock(D.m);
    if (name.empty()) D.lanes.erase(s); else D.lanes[s] = name;
  });
  m.def("set_label", &set_label);
  m.def("restore_label", [](int old) { label = old; });
  py::class_<Event>(m, "Event").def(py::init<>())
      .def_readonly("recorded", &Event::recorded)
      .def("record", [](Event& e, int s) { record_event(e, s); })
      .def("known", [](Event& e) { return is_known(e); })
      .def("covers", [](Event& e, Event& other) { Lock lock(D.m); return e.at.covers(other.at); })
      .def("sync", [](Event& e) { host_knows(e); });
  m.def("stream_wait", [](int s, const Event& e) { wait_event(s, e); });
  m.def("stream_sync", [](int s) { return host_waits_for_stream(s); });
  m.def("device_sync", &host_waits_for_all);
  m.def("work_on", &work_on);

  m.def("pin", &pin);
  m.def("unpin", &unpin);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("record_stream", &record_stream);
  m.def("refuse", [] { Lock lock(D.m); D.refused = true; });
  m.def("host_begin", &host_begin);
  m.def("host_end", [](int64_t key) { Lock lock(D.m); D.host_accesses.erase(key); });
  m.def("memory", [] { Lock lock(D.m); return std::make_tuple(D.allocated, D.peak); });
  m.def("reset_peak", [] { Lock lock(D.m); D.peak = D.allocated; });
  m.def("limit_hbm", [](size_t n) { Lock lock(D.m); D.hbm_bytes = n; });
  m.def("hbm_limit", [] { Lock lock(D.m); return D.hbm_bytes; });
  m.def("workspace", [](size_t n) { Lock lock(D.m); D.workspace_bytes = n; });
}
