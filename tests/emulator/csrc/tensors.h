// Tensors of the device, seen as the CPU's.
#pragma once
#include "fake.h"
#include <ATen/core/Tensor.h>

using at::Tensor;
constexpr auto PU1 = c10::DeviceType::PrivateUse1;

struct Span { uintptr_t lo; size_t bytes; };
Span span(const Tensor& t);  // from its lowest byte to its highest

struct Alias {  // CPU tensors over the same bytes; one storage for each of the device's
  std::unordered_map<c10::StorageImpl*, c10::Storage> seen;
  Tensor of(const Tensor& t);
  bool has(const Tensor& cpu) const;
};

c10::Allocator* device_allocator();
c10::DataPtr take_workspace();
Tensor device_like(const Tensor& cpu);  // on the device, with its geometry and bytes
void watch_the_host();
