// The backward of batch norm over the rows of a matrix: see gact_graph/ops/batch_norm.py. Two
// passes over the input and the gradient, of which the second may write over the input.

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "checks.h"
#include "parallel.h"

namespace gact_graph {
namespace {

constexpr int64_t kRows = 256;  // of a part, at least

// Adds the rows from `begin` to `end` to the sums of gradients and of products, [2, columns].
template <typename scalar_t>
void add_rows(const scalar_t* x, const scalar_t* gradient, const scalar_t* mean, int64_t columns,
              int64_t begin, int64_t end, scalar_t* __restrict sums) {
  scalar_t* __restrict products = sums + columns;
  for (int64_t row = begin; row < end; ++row) {
    const scalar_t* own = x + row * columns;
    const scalar_t* of_own = gradient + row * columns;
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) {
      sums[c] += of_own[c];
      products[c] += (own[c] - mean[c]) * of_own[c];
    }
  }
}

// Writes a row of shift + (x - mean) * slope + gradient * scale. Each element is read before it is
// written, should the row be that of x.
template <typename scalar_t>
void write_row(const scalar_t* x, const scalar_t* gradient, const scalar_t* mean,
               const scalar_t* slope, const scalar_t* shift, const scalar_t* scale,
               int64_t columns, scalar_t* to) {
#pragma omp simd
  for (int64_t c = 0; c < columns; ++c) {
    to[c] = shift[c] + (x[c] - mean[c]) * slope[c] + gradient[c] * scale[c];
  }
}

at::Tensor batch_norm_backward(at::Tensor& of_x, const at::Tensor& gradient, const at::Tensor& x,
                               const at::Tensor& statistics) {
  check_dim("x", x, 2);
  const int64_t rows = x.size(0), columns = x.size(1);
  const at::ScalarType dtype = x.scalar_type();
  check_tensor("gradient", gradient, dtype, {rows, columns});
  check_tensor("of_x", of_x, dtype, {rows, columns});
  check_tensor("statistics", statistics, dtype, {3, columns});
  check_no_overlap({of_x}, {gradient, statistics});
  if (!of_x.is_same(x) && of_x.const_data_ptr() != x.const_data_ptr()) {
    check_no_overlap({of_x}, {x});
  }
  at::Tensor sums = at::empty({2, columns}, x.options());
  // Parts of a number that the number of threads does not affect: the result is always the same.
  const int64_t parts = std::clamp<int64_t>(rows / kRows, 1, kMostParts);
  const auto begin_of = [&](int64_t part) { return rows * part / parts; };
  AT_DISPATCH_FLOATING_TYPES(dtype, "batch_norm_backward", [&] {
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    const scalar_t* of_result = gradient.const_data_ptr<scalar_t>();
    const scalar_t* center = statistics.const_data_ptr<scalar_t>();
    const scalar_t* wide = center + columns;
    const scalar_t* factor = wide + columns;
    std::vector<scalar_t> partial(parts * 2 * columns, 0);
    for_each_part(parts, [&](int64_t part) {
      add_rows(from, of_result, center, columns, begin_of(part), begin_of(part + 1),
               partial.data() + part * 2 * columns);
    });
    scalar_t* totals = sums.mutable_data_ptr<scalar_t>();
    for (int64_t c = 0; c < 2 * columns; ++c) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) total += partial[part * 2 * columns + c];
      totals[c] = static_cast<scalar_t>(total);
    }
    std::vector<scalar_t> slope(columns), shift(columns);
    for (int64_t c = 0; c < columns; ++c) {
      const scalar_t share = -factor[c] / static_cast<scalar_t>(rows);
      slope[c] = share * wide[c] * wide[c] * totals[columns + c];
      shift[c] = share * totals[c];
    }
    scalar_t* to = of_x.mutable_data_ptr<scalar_t>();
    for_each_part(parts, [&](int64_t part) {
      for (int64_t row = begin_of(part); row < begin_of(part + 1); ++row) {
        const int64_t at = row * columns;
        write_row(from + at, of_result + at, center, slope.data(), shift.data(), factor, columns,
                  to + at);
      }
    });
  });
  return sums;
}

}  // namespace

TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("batch_norm_backward", &batch_norm_backward);
}

}  // namespace gact_graph
