// Operations of the host on page-locked memory, on any thread: torch tells us of each.
#include "fake.h"
#include "tensors.h"
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

// They return or change metadata alone.
static const std::unordered_set<std::string> METADATA{
  "aten::detach", "aten::alias", "aten::is_pinned", "aten::set_", "aten::empty_like",
  "aten::new_empty", "aten::empty_strided", "aten::as_strided", "aten::split", "aten::lift_fresh",
  "aten::_has_compatible_shallow_copy_type", "aten::new_empty_strided"};

struct HostOp : at::ObserverContext { std::vector<int64_t> accesses; };
struct Use { Span span; bool write; };

static bool is_view(const c10::FunctionSchema& schema) {
  bool views = false, writes = false;
  for (auto& r : schema.returns()) if (r.alias_info() && !r.alias_info()->isWrite()) views = true;
  for (auto& a : schema.arguments()) if (a.alias_info() && a.alias_info()->isWrite()) writes = true;
  return views && !writes;
}

// Add what the host uses of a tensor; false if it is on the device: no work of the host then.
static bool add_use(const Tensor& t, bool write, std::vector<Use>& uses) {
  if (!t.defined()) return true;
  if (t.device().type() == PU1) return false;
  if (t.device().is_cpu() && t.layout() == at::kStrided && t.has_storage() && t.numel())
    uses.push_back({span(t), write});
  return true;
}

static std::vector<Use> uses_of(const at::RecordFunction& fn, const c10::FunctionSchema& schema) {
  std::vector<Use> uses;
  size_t i = 0;
  for (const auto& value : fn.inputs()) {
    auto* info = i < schema.arguments().size() ? schema.arguments()[i].alias_info() : nullptr;
    bool write = info && info->isWrite();
    i++;
    if (value.isTensor()) { if (!add_use(value.toTensor(), write, uses)) return {}; }
    else if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) if (!add_use(t, write, uses)) return {};
  }
  return uses;
}

static std::unique_ptr<at::ObserverContext> host_begins(const at::RecordFunction& fn) {
  if (!D.on || inside) return nullptr;
  auto schema = fn.operator_schema();
  if (!schema || METADATA.count(schema->name()) || is_view(*schema)) return nullptr;
  auto uses = uses_of(fn, *schema);
  if (uses.empty()) return nullptr;
  auto context = std::make_unique<HostOp>();
  {
    Lock lock(D.m);
    for (auto& use : uses) {
      auto* r = D.find(use.span.lo);
      if (r && !r->device)
        context->accesses.push_back(
            host_begins_locked(use.span.lo, use.span.bytes, use.write, schema->name()));
    }
  }
  take_stacks();
  return context;
}

static void host_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  Lock lock(D.m);
  for (auto key : static_cast<HostOp*>(context)->accesses) D.host_accesses.erase(key);
}

void watch_the_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(host_begins, host_ends)
                            .needsInputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
}
