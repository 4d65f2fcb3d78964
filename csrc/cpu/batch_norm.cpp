// The backward of batch norm over the rows of a matrix, and the restoring of columns that were
// normalized: see gact_graph/ops/batch_norm.py. Each takes two passes, of which the second may
// write over the input.

#include <algorithm>
#include <vector>

#include "checks.h"
#include "dtypes.h"
#include "parallel.h"

namespace gact_graph {
namespace {

constexpr int64_t kRows = 256;  // of a part, at least

// Rows in parts of a number that the number of threads does not affect: results are always the
// same.
class Parts {
 public:
  explicit Parts(int64_t rows)
      : rows_(rows), count_(std::clamp<int64_t>(rows / kRows, 1, kMostParts)) {}

  // Calls work(begin, end) for the rows of each part.
  template <typename Work>
  void each(const Work& work) const {
    for_each_part(count_, [&](int64_t part) { work(begin(part), begin(part + 1)); });
  }

  // Returns the sums over all parts of what work(begin, end, sums) adds to `width` zeros.
  template <typename scalar_t, typename Work>
  std::vector<double> sums(int64_t width, const Work& work) const {
    std::vector<scalar_t> partial(count_ * width, 0);
    for_each_part(count_, [&](int64_t part) {
      work(begin(part), begin(part + 1), partial.data() + part * width);
    });
    std::vector<double> totals(width, 0);
    for (int64_t part = 0; part < count_; ++part) {
      for (int64_t i = 0; i < width; ++i) totals[i] += partial[part * width + i];
    }
    return totals;
  }

 private:
  int64_t begin(int64_t part) const { return rows_ * part / count_; }

  int64_t rows_;
  int64_t count_;
};

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
               const scalar_t* slope, const scalar_t* shift, const scalar_t* scale, int64_t columns,
               scalar_t* to) {
#pragma omp simd
  for (int64_t c = 0; c < columns; ++c) {
    to[c] = shift[c] + (x[c] - mean[c]) * slope[c] + gradient[c] * scale[c];
  }
}

Tensor batch_norm_backward(Tensor& of_x, const Tensor& gradient, const Tensor& x,
                           const Tensor& statistics) {
  check_dim("x", x, 2);
  const int64_t rows = x.size(0), columns = x.size(1);
  const ScalarType dtype = x.scalar_type();
  check_tensor("gradient", gradient, dtype, {rows, columns});
  check_tensor("of_x", of_x, dtype, {rows, columns});
  check_tensor("statistics", statistics, dtype, {3, columns});
  check_no_overlap({&of_x}, {&gradient, &statistics});
  if (of_x.const_data_ptr() != x.const_data_ptr()) {
    check_no_overlap({&of_x}, {&x});
  }
  Tensor sums = empty({2, columns}, dtype);
  const Parts parts(rows);
  with_real(dtype, [&](auto real) {
    using scalar_t = decltype(real);
    const scalar_t* from = const_data<scalar_t>(x);
    const scalar_t* of_result = const_data<scalar_t>(gradient);
    const scalar_t* center = const_data<scalar_t>(statistics);
    const scalar_t* wide = center + columns;
    const scalar_t* factor = wide + columns;
    const auto add = [&](int64_t begin, int64_t end, scalar_t* to) {
      add_rows(from, of_result, center, columns, begin, end, to);
    };
    const std::vector<double> exact = parts.sums<scalar_t>(2 * columns, add);
    scalar_t* totals = mutable_data<scalar_t>(sums);
    std::copy(exact.begin(), exact.end(), totals);
    std::vector<scalar_t> slope(columns), shift(columns);
    for (int64_t c = 0; c < columns; ++c) {
      const scalar_t share = -factor[c] / static_cast<scalar_t>(rows);
      slope[c] = share * wide[c] * wide[c] * totals[columns + c];
      shift[c] = share * totals[c];
    }
    scalar_t* to = mutable_data<scalar_t>(of_x);
    parts.each([&](int64_t begin, int64_t end) {
      for (int64_t at = begin * columns; at < end * columns; at += columns) {
        write_row(from + at, of_result + at, center, slope.data(), shift.data(), factor, columns,
                  to + at);
      }
    });
  });
  return sums;
}

template <typename scalar_t>
void add_row(const scalar_t* x, int64_t columns, scalar_t* sums) {
#pragma omp simd
  for (int64_t c = 0; c < columns; ++c) sums[c] += x[c];
}

template <typename scalar_t>
void restore_row(const scalar_t* shift, const scalar_t* deviation, int64_t columns, scalar_t* x) {
#pragma omp simd
  for (int64_t c = 0; c < columns; ++c) x[c] = shift[c] + x[c] * deviation[c];
}

void restore_columns(Tensor& x, const Tensor& statistics) {
  check_dim("x", x, 2);
  const int64_t rows = x.size(0), columns = x.size(1);
  check_tensor("x", x, x.scalar_type(), {rows, columns});
  check_tensor("statistics", statistics, x.scalar_type(), {2, columns});
  check_no_overlap({&x}, {&statistics});
  const Parts parts(rows);
  with_real(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    scalar_t* values = mutable_data<scalar_t>(x);
    const scalar_t* mean = const_data<scalar_t>(statistics);
    const scalar_t* deviation = mean + columns;
    const auto add = [&](int64_t begin, int64_t end, scalar_t* to) {
      for (int64_t row = begin; row < end; ++row) add_row(values + row * columns, columns, to);
    };
    const std::vector<double> sums = parts.sums<scalar_t>(columns, add);
    std::vector<scalar_t> shift(columns);
    for (int64_t c = 0; c < columns; ++c) {
      const auto own = static_cast<scalar_t>(sums[c] / static_cast<double>(rows));
      shift[c] = mean[c] - own * deviation[c];
    }
    parts.each([&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        restore_row(shift.data(), deviation, columns, values + row * columns);
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("batch_norm_backward", TORCH_BOX(&batch_norm_backward));
  library.impl("restore_columns", TORCH_BOX(&restore_columns));
}

}  // namespace gact_graph
