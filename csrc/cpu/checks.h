// Checks of the arguments of operators, which may be called directly with any arguments: kernels
// read and write memory without further checks.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>

namespace gact_graph {

inline int64_t ceil_div(int64_t count, int64_t by) { return count / by + (count % by != 0); }

// Checks that a tensor is strided, on the CPU, and inside its storage.
inline void check_readable(const char* name, const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.defined(), "Expected ", name, " to be a tensor (got none)");
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, "Expected ", name, " to be a strided tensor (got ",
                   x.layout(), ")");
  TORCH_CHECK_VALUE(x.device().is_cpu(), "Expected ", name, " on the CPU (got ", x.device(), ")");
  if (x.numel() == 0) return;
  // untyped_storage().resize_() shrinks a storage without regard to its tensors.
  const int64_t held = static_cast<int64_t>(x.storage().nbytes() / x.element_size());
  int64_t last = x.storage_offset();
  for (int64_t i = 0; i < x.dim(); ++i) last += x.stride(i) * (x.size(i) - 1);
  TORCH_CHECK_VALUE(last < held, "Expected ", name, " to have its memory (got ", held,
                    " elements of storage)");
}

// Checks that a tensor is readable and contiguous and has a dtype and shape.
inline void check_tensor(const char* name, const at::Tensor& x, at::ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  check_readable(name, x);
  TORCH_CHECK_TYPE(x.scalar_type() == dtype, "Expected ", name, " of ", dtype, " (got ",
                   x.scalar_type(), ")");
  TORCH_CHECK_VALUE(x.sizes() == at::IntArrayRef(shape) && x.is_contiguous(), "Expected ", name,
                    " of ", at::IntArrayRef(shape), ", contiguous (got ", x.sizes(),
                    x.is_contiguous() ? ")" : ", not contiguous)");
}

// Checks that a tensor is readable and contiguous and has a number of dimensions.
inline void check_dim(const char* name, const at::Tensor& x, int64_t dim) {
  check_readable(name, x);
  TORCH_CHECK_VALUE(x.dim() == dim && x.is_contiguous(), "Expected ", name, " of ", dim,
                    " dimension(s), contiguous (got ", x.sizes(),
                    x.is_contiguous() ? ")" : ", not contiguous)");
}

inline bool is_coded(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

inline void check_coded(const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(is_coded(dtype), "Expected ", name,
                   " of float16, bfloat16, float32 or float64 (got ", dtype, ")");
}

// Checks that outputs share no memory with inputs or with each other. Tensors may be undefined.
inline void check_no_overlap(at::TensorList outputs, at::TensorList inputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const at::Tensor& input : inputs) {
      if (input.defined()) at::assert_no_overlap(outputs[i], input);
    }
    for (size_t j = 0; j < i; ++j) at::assert_no_overlap(outputs[i], outputs[j]);
  }
}

// Returns the number of elements of a shape.
inline int64_t checked_numel(at::IntArrayRef shape) {
  int64_t numel = 1;
  bool overflow = false;
  for (const int64_t size : shape) {
    TORCH_CHECK_VALUE(size >= 0, "Expected a shape of sizes from 0 on (got ", shape, ")");
    overflow |= __builtin_mul_overflow(numel, size, &numel);
  }
  TORCH_CHECK_VALUE(!overflow, "Expected a shape of less than 2^63 elements (got ", shape, ")");
  return numel;
}

}  // namespace gact_graph
