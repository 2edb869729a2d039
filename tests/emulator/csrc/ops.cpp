// Kernels: every operation that is not here is the CPU's, on aliases, with its accesses checked.
#include "tensors.h"
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

using Names = const std::unordered_set<std::string>;
static Names MIXED{  // take indices of the CPU
  "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
  "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"};
static Names SYNCS{  // their result's size is the host's business
  "aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique_dim", "aten::_unique2",
  "aten::unique_consecutive"};
static Names GEMMS{  // cuBLAS takes a workspace for each thread
  "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot",
  "aten::mm.out", "aten::addmm.out", "aten::bmm.out"};
static thread_local c10::DataPtr workspace;

static std::string name_of(const c10::FunctionSchema& schema) {
  auto& overload = schema.overload_name();
  return overload.empty() ? schema.name() : schema.name() + "." + overload;
}

// -- any operation, on the CPU ---------------------------------------------------------------------

struct Call {  // one operation whose arguments become aliases, and whose results come back
  std::string name;
  Alias alias{};
  std::vector<std::pair<Tensor, bool>> touched{};   // the device's, and whether it is written
  std::vector<std::pair<Tensor, Tensor>> outs{};    // what is written: the device's, and its alias
  bool mixed = false;

  Tensor lower(const Tensor& t, bool write) {
    if (!t.defined()) return t;
    if (t.device().type() != PU1) {
      if (t.dim() > 0 && t.numel() > 0 && t.device().is_cpu()) mixed = true;
      return t;
    }
    auto cpu = alias.of(t);
    touched.push_back({t, write});
    if (write) outs.push_back({t, cpu});
    return cpu;
  }

  void lower(c10::IValue& v, const c10::Argument& argument) {
    bool write = argument.alias_info() && argument.alias_info()->isWrite();
    if (v.isTensor()) v = lower(v.toTensor(), write);
    else if (v.isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& t : v.toTensorVector()) all.push_back(lower(t, write));
      v = c10::IValue(all);
    } else if (v.isList() && argument.type()->str().find("Tensor") != std::string::npos) {
      c10::List<std::optional<Tensor>> all;
      for (const auto& e : v.toListRef())
        all.push_back(e.isTensor() ? std::optional(lower(e.toTensor(), write)) : std::nullopt);
      v = c10::IValue(all);
    } else if (v.isDevice() && v.toDevice().type() == PU1) v = c10::IValue(c10::Device(c10::kCPU));
  }

  void check() const {
    int s = current_stream;
    TORCH_CHECK(!mixed || touched.empty() || MIXED.count(name),
                "Expected all tensors to be on the same device (fakecuda and cpu), in ", name);
    if (SYNCS.count(name)) host_waits_for_stream(s, name);
    {
      Lock lock(D.m);
      begin_op_locked(s);
      if (D.on) {
        int id = D.id(labelled_locked(name));
        for (auto& [t, write] : touched) {
          auto [lo, bytes] = span(t);
          touch_locked(lo, bytes, s, write, id);
        }
      }
    }
    take_stacks();
  }

  void resize_outs() const {
    for (auto& [t, cpu] : outs)
      if (cpu.sizes() != t.sizes()) {
        t.resize_(cpu.sizes());
        Alias again;
        again.of(t).copy_(cpu);
      }
  }

  Tensor raise(const Tensor& t) const {
    if (!t.defined()) return t;
    for (auto& [device, cpu] : outs) if (cpu.is_same(t)) return device;
    auto* storage = t.storage().unsafeGetStorageImpl();
    for (auto& [device, cpu] : outs)
      if (cpu.storage().unsafeGetStorageImpl() == storage && cpu.sizes() == t.sizes()) return device;
    TORCH_CHECK(!alias.has(t), "the emulated device has no kernel for a view: ", name);
    return device_like(t);
  }

  void raise(c10::IValue& v) const {
    if (v.isTensor()) v = raise(v.toTensor());
    else if (v.isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& t : v.toTensorVector()) all.push_back(raise(t));
      v = c10::IValue(all);
    }
  }
};

void tell_refusal() {
  Lock lock(D.m);
  TORCH_CHECK(!std::exchange(D.refused, false), "CUDA error: out of memory");
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call{name_of(schema)};
  if (D.workspace_bytes && !workspace && GEMMS.count(call.name))
    workspace = device_allocator()->allocate(D.workspace_bytes);
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  std::vector<c10::IValue> kept(stack->begin() + first, stack->end());
  for (size_t i = 0; i < n; i++) call.lower((*stack)[first + i], schema.arguments()[i]);
  call.check();
  tell_refusal();
  Inside us;
  op.callBoxed(stack);
  call.resize_outs();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    call.raise((*stack)[i]);
}

// -- memory and metadata ---------------------------------------------------------------------------

static const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// In deterministic mode a kernel fills new memory, in the order of the stream that asks.
static Tensor made(Tensor t) {
  auto& torch = at::globalContext();
  if (!torch.deterministicAlgorithms() || !torch.deterministicFillUninitializedMemory() || !t.numel())
    return t;
  auto [lo, bytes] = span(t);
  {
    Lock lock(D.m);
    begin_op_locked(current_stream);
    if (D.on) touch_locked(lo, bytes, current_stream, true, D.id("the fill of new memory"));
  }
  take_stacks();
  memset((void*)lo, 0xFF, bytes);
  return t;
}

static Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Layout>, std::optional<at::Device>,
                                  std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return made(at::detail::empty_generic_symint(size, device_allocator(), KEYS,
                                               c10::dtype_or_default(dtype), format));
}

static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<at::Device>, std::optional<bool>) {
  return made(at::detail::empty_strided_symint_generic(size, stride, device_allocator(), KEYS,
                                                       c10::dtype_or_default(dtype)));
}

static const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size,
                             std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t need = (self.storage_offset() + self.numel()) * self.element_size();
  if (need > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  return self;
}

static bool compatible(const Tensor&, const Tensor&) { return true; }

static Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset,
                           c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  return self;
}

static Tensor& set_source(Tensor& self, at::Storage storage) {
  c10::SymInt n((int64_t)storage.nbytes() / self.element_size()), one(1);
  return set_storage(self, std::move(storage), 0, {&n, 1}, {&one, 1});
}

static Tensor& set_tensor(Tensor& self, const Tensor& src) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(src.storage());
  impl->set_sizes_and_strides(src.sizes(), src.strides());
  impl->set_storage_offset(src.storage_offset());
  return self;
}

// -- copies ----------------------------------------------------------------------------------------

static at::Scalar local_scalar(const Tensor& self) {
  int s = current_stream;
  host_waits_for_stream(s, "item");
  {
    Lock lock(D.m);
    begin_op_locked(s);
    auto [lo, bytes] = span(self);
    if (D.on) touch_locked(lo, bytes, s, false, D.id("item"));
  }
  take_stacks();
  Alias alias;
  return alias.of(self).item();
}

struct Copy {
  const Tensor &from, &to;
  bool asynchronous;
  bool reads_device = from.device().type() == PU1, writes_device = to.device().type() == PU1;
  bool across = reads_device != writes_device;
  bool locked = false;  // the host's side is page-locked, and bytes are copied as they are

  std::string direction() const { return writes_device ? "copy up" : "copy down"; }

  // CUDA takes host memory that is page-locked, or none of which is: not a part of it.
  void check_whole() const {
    const Tensor& host = writes_device ? from : to;
    bool is_read_there = host.is_contiguous() && (!writes_device || from.scalar_type() == to.scalar_type());
    if (!across || !is_read_there) return;
    auto [lo, bytes] = span(host);
    Lock lock(D.m);
    TORCH_CHECK(!is_torn_locked(lo, bytes), "CUDA error: invalid argument: a copy of host memory",
                " of which a part is page-locked");
  }

  void look_locked() {
    bool as_is = from.scalar_type() == to.scalar_type() && from.is_contiguous() &&
                 to.is_contiguous() && from.sizes() == to.sizes();
    auto* r = across ? D.find(span(writes_device ? from : to).lo) : nullptr;
    locked = as_is && r && !r->device;
  }

  std::string name() const {
    if (!across) return "copy";
    if (locked) return direction();
    return direction() + (writes_device ? " of pageable memory" : " to pageable memory");
  }

  void check() {
    int s = current_stream;
    check_whole();
    {
      Lock lock(D.m);
      look_locked();
      begin_op_locked(s);
      if (D.on) {
        int id = D.id(labelled_locked(name()));
        if (reads_device || locked) { auto [lo, n] = span(from); touch_locked(lo, n, s, false, id); }
        if (writes_device || locked) { auto [lo, n] = span(to); touch_locked(lo, n, s, true, id); }
        if (across) D.copies[(asynchronous ? "asynchronous " : "blocking ") + name()]++;
      }
    }
    take_stacks();
    if (across && !(asynchronous && locked))
      host_waits_for_stream(s, asynchronous ? "asynchronous " + name() : "blocking " + direction());
  }
};

static Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Copy copy{self, dst, non_blocking};
  copy.check();
  Alias alias;
  Tensor to = copy.writes_device ? alias.of(dst) : dst;
  Tensor from = copy.reads_device ? alias.of(self) : self;
  at::AutoDispatchBelowAutograd below;
  Inside us;
  to.copy_(from);
  return dst;
}

static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

// -- operations that torch sends elsewhere ---------------------------------------------------------

static int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                          double, bool, std::optional<double>, bool) {
  return 0;  // plain operations
}

#define INTS(x) C10_AS_INTARRAYREF_SLOW(x)
using SymInts = c10::SymIntArrayRef;

static void check_convolution(std::initializer_list<Tensor> inputs, const std::string& name) {
  Call call{name};
  for (auto& t : inputs) call.lower(t, false);
  call.check();
}

static Tensor conv(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                   SymInts stride, SymInts pad, SymInts dilation, bool transposed, SymInts out_pad,
                   c10::SymInt groups) {
  Tensor b = bias ? *bias : Tensor();
  check_convolution({x, w, b}, "aten::convolution");
  Alias alias;
  auto cpu_bias = b.defined() ? std::optional(alias.of(b)) : std::nullopt;
  Inside us;
  auto out = at::convolution(alias.of(x), alias.of(w), cpu_bias, INTS(stride), INTS(pad),
                             INTS(dilation), transposed, INTS(out_pad), groups.expect_int());
  return device_like(out.contiguous());
}

static std::tuple<Tensor, Tensor, Tensor> conv_back(
    const Tensor& grad, const Tensor& x, const Tensor& w, SymInts stride, SymInts pad,
    SymInts dilation, bool transposed, SymInts out_pad, c10::SymInt groups,
    std::array<bool, 3> mask) {
  check_convolution({grad, x, w}, "aten::convolution_backward");
  Alias alias;
  std::vector<int64_t> bias{transposed ? w.size(1) * groups.expect_int() : w.size(0)};
  Inside us;
  auto [dx, dw, db] = at::convolution_backward(
      alias.of(grad), alias.of(x), alias.of(w), at::OptionalIntArrayRef(bias), INTS(stride),
      INTS(pad), INTS(dilation), transposed, INTS(out_pad), groups.expect_int(), mask);
  auto up = [](const Tensor& t) { return t.defined() ? device_like(t.contiguous()) : Tensor(); };
  return {up(dx), up(dw), up(db)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_has_compatible_shallow_copy_type", compatible);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("convolution_overrideable", conv);
  m.impl("convolution_backward_overrideable", conv_back);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {  // autocast changes nothing
  m.fallback(torch::CppFunction::makeFallthrough());
}
