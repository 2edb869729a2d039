// What torch asks of a device: an allocator, streams and events, hooks.
#include "tensors.h"
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

Span span(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return {0, 0};
  int64_t lo = 0, hi = 0;
  for (int64_t d = 0; d < t.dim(); d++) {
    int64_t end = (t.size(d) - 1) * t.stride(d);
    if (end < 0) lo += end; else hi += end;
  }
  auto base = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  auto size = (int64_t)t.element_size();
  return {base + lo * size, (size_t)((hi - lo + 1) * size)};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Device device(PU1, 0);
    if (n == 0) return {nullptr, nullptr, &free_device, device};
    void* p = take_device(n);
    TORCH_CHECK_WITH(OutOfMemoryError, p, "The emulated CUDA device is out of memory: ", n,
                     " bytes asked for, ", D.allocated, " allocated of ", D.hbm_bytes);
    return {p, p, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static Allocator the_allocator;
c10::Allocator* device_allocator() { return &the_allocator; }

Tensor Alias::of(const Tensor& t) {
  auto* impl = t.storage().unsafeGetStorageImpl();
  auto it = seen.find(impl);
  if (it == seen.end()) {
    auto keep = new c10::Storage(t.storage());
    c10::DataPtr p(const_cast<void*>(t.storage().data()), keep,
                   [](void* kept) { delete (c10::Storage*)kept; }, c10::Device(c10::kCPU));
    c10::Storage cpu(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(p),
                     c10::GetCPUAllocator(), true);
    it = seen.emplace(impl, cpu).first;
  }
  at::AutoDispatchBelowAutograd below;
  auto out = at::empty({0}, t.options().device(c10::kCPU).requires_grad(false));
  out.set_(it->second, t.storage_offset(), t.sizes(), t.strides());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

bool Alias::has(const Tensor& cpu) const {
  for (auto& [impl, storage] : seen)
    if (storage.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) return true;
  return false;
}

Tensor device_like(const Tensor& cpu) {
  at::AutoDispatchBelowAutograd below;
  auto options = cpu.options().device(c10::Device(PU1, 0));
  auto out = at::empty_strided(cpu.sizes(), cpu.strides(), options);
  Alias alias;
  alias.of(out).copy_(cpu);
  return out;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device only() { return c10::Device(PU1, 0); }
  static c10::Stream stream(int s) { return c10::Stream(c10::Stream::UNSAFE, only(), s); }
  c10::DeviceType type() const override { return PU1; }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Device getDevice() const override { return only(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = stream(current_stream);
    current_stream = s.id();
    return old;
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    record_event(*(Event*)*event, s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) wait_event(s.id(), *(Event*)event);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete (Event*)event;
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    record_stream((uintptr_t)p.get(), s.id());
  }
  void synchronizeEvent(void* event) const override { if (event) host_knows(*(Event*)event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override { host_waits_for_stream(s.id()); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return Guard::only(); }
  bool isPinnedPtr(const void* p) const override {
    Lock lock(D.m);
    auto r = D.find((uintptr_t)p);
    return r && !r->device;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto fresh = the_allocator.allocate(n);
    if (fresh.get() && storage.data())
      memcpy(fresh.get(), storage.data(), std::min(n, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(n);
  }
};

void register_with_torch() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::globalContext().lazyInitDevice(PU1);
  watch_the_host();
}
