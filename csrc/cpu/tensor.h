// Tensors through LibTorch's stable ABI, so that one library serves many versions of torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e4m3fnuz.h>
#include <torch/headeronly/util/Float8_e5m2.h>
#include <torch/headeronly/util/Float8_e5m2fnuz.h>
#include <torch/headeronly/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

namespace gact_graph {

using c10::BFloat16;
using c10::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // of torch 2.10
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

inline size_t nbytes(const Tensor& x) { return static_cast<size_t>(x.numel()) * x.element_size(); }

// The elements of a tensor whose dtype was checked.
template <typename T>
const T* const_data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <typename T>
T* mutable_data(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

// The number by which the running torch knows a dtype.
inline int32_t number_of(ScalarType dtype) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

// Whether a tensor has a dtype: faster than a comparison of x.scalar_type().
inline bool has_dtype(const Tensor& x, ScalarType dtype) {
  int32_t number = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &number));
  return number == number_of(dtype);
}

// Returns an uninitialized contiguous tensor on the CPU.
inline Tensor empty(Shape shape, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * (shape[i] > 1 ? shape[i] : 1);
  }
  AtenTensorHandle result = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                               number_of(dtype), aoti_torch_device_type_cpu(), 0, &result));
  return Tensor(result);
}
inline Tensor empty(std::initializer_list<int64_t> shape, ScalarType dtype) {
  return empty(Shape(shape.begin(), shape.size()), dtype);
}

inline Tensor as_contiguous(const Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

}  // namespace gact_graph
