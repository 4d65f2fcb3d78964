// Checks of the arguments of operators, which may be called directly with any arguments: kernels
// read and write memory without further checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "errors.h"
#include "tensor.h"

namespace gact_graph {

inline int64_t ceil_div(int64_t count, int64_t by) { return count / by + (count % by != 0); }

inline std::string text_of(Shape shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// Checks that a tensor is strided, on the CPU, and inside its storage.
inline void check_readable(const char* name, const Tensor& x) {
  GACT_CHECK_VALUE(x.defined(), "Expected ", name, " to be a tensor (got none)");
  int32_t layout = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(x.get(), &layout));
  GACT_CHECK_VALUE(layout == aoti_torch_layout_strided(), "Expected ", name,
                   " to be a strided tensor (got another layout)");
  GACT_CHECK_VALUE(x.is_cpu(), "Expected ", name, " on the CPU (got another device)");
  if (x.numel() == 0) return;
  // untyped_storage().resize_() shrinks a storage without regard to its tensors.
  int64_t bytes = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
  const int64_t held = bytes / static_cast<int64_t>(x.element_size());
  const Shape sizes = x.sizes(), strides = x.strides();
  int64_t last = x.storage_offset();
  for (size_t i = 0; i < sizes.size(); ++i) last += strides[i] * (sizes[i] - 1);
  GACT_CHECK_VALUE(last < held, "Expected ", name, " to have its memory (got ", held,
                   " elements of storage)");
}

// Checks that a tensor is readable and contiguous and has a dtype and shape.
inline void check_tensor(const char* name, const Tensor& x, ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  check_readable(name, x);
  GACT_CHECK_VALUE(has_dtype(x, dtype), "Expected ", name, " of ", dtype, " (got ", x.scalar_type(),
                   ")");
  const Shape wanted(shape.begin(), shape.size()), sizes = x.sizes();
  // Shapes of torch 2.10 do not compare.
  const bool same = std::equal(wanted.begin(), wanted.end(), sizes.begin(), sizes.end());
  GACT_CHECK_VALUE(same && x.is_contiguous(), "Expected ", name, " of ", text_of(wanted),
                   ", contiguous (got ", text_of(sizes),
                   x.is_contiguous() ? ")" : ", not contiguous)");
}

// Checks that a tensor is readable and contiguous and has a number of dimensions.
inline void check_dim(const char* name, const Tensor& x, int64_t dim) {
  check_readable(name, x);
  GACT_CHECK_VALUE(x.dim() == dim && x.is_contiguous(), "Expected ", name, " of ", dim,
                   " dimension(s), contiguous (got ", text_of(x.sizes()),
                   x.is_contiguous() ? ")" : ", not contiguous)");
}

// Whether contiguous tensors share memory.
inline bool overlap(const Tensor& a, const Tensor& b) {
  const char* first = static_cast<const char*>(a.const_data_ptr());
  const char* second = static_cast<const char*>(b.const_data_ptr());
  return first < second + nbytes(b) && second < first + nbytes(a);
}

// Checks that outputs share no memory with inputs or with each other. All are contiguous, and
// inputs may be null.
inline void check_no_overlap(std::initializer_list<const Tensor*> outputs,
                             std::initializer_list<const Tensor*> inputs) {
  const auto check = [](const Tensor& output, const Tensor& other) {
    GACT_CHECK(std::runtime_error, !overlap(output, other),
               "Expected results and arguments of different memory (got a part that two share)");
  };
  for (auto output = outputs.begin(); output != outputs.end(); ++output) {
    for (const Tensor* input : inputs) {
      if (input != nullptr) check(**output, *input);
    }
    for (auto other = outputs.begin(); other != output; ++other) check(**output, **other);
  }
}

inline const Tensor* pointer_to(const std::optional<Tensor>& x) { return x ? &*x : nullptr; }

// Returns the number of elements of a shape.
inline int64_t checked_numel(Shape shape) {
  int64_t numel = 1;
  bool overflow = false;
  for (const int64_t size : shape) {
    GACT_CHECK_VALUE(size >= 0, "Expected a shape of sizes from 0 on (got ", text_of(shape), ")");
    overflow |= __builtin_mul_overflow(numel, size, &numel);
  }
  GACT_CHECK_VALUE(!overflow, "Expected a shape of less than 2^63 elements (got ", text_of(shape),
                   ")");
  return numel;
}

}  // namespace gact_graph
