// The edges of rows, divided among threads so that results do not depend on their number.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "checks.h"
#include "dtypes.h"
#include "parallel.h"

namespace gact_graph {

// The distance, in edges, at which rows are prefetched.
constexpr int64_t kAhead = 8;

// The least edges in a part of the work.
constexpr int64_t kGrain = 512;

template <typename scalar_t>
void prefetch(const scalar_t* row, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(scalar_t);
  for (int64_t i = 0; i < width; i += kLine) __builtin_prefetch(row + i);
}

template <typename scalar_t>
void add_scaled(scalar_t* to, const scalar_t* from, scalar_t by, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += by * from[i];
}

template <typename scalar_t>
scalar_t dot(const scalar_t* a, const scalar_t* b, int64_t count) {
  scalar_t product = 0;
#pragma omp simd reduction(+ : product)
  for (int64_t i = 0; i < count; ++i) product += a[i] * b[i];
  return product;
}

// The edges of rows: those of row r are starts[r] - starts[0] to starts[r + 1] - starts[0].
struct Edges {
  // Checks that the starts of rows span `edges` edges.
  Edges(const Tensor& of_rows, int64_t edges) {
    check_dim("starts", of_rows, 1);
    rows = of_rows.size(0) - 1;
    GACT_CHECK_VALUE(rows >= 0, "Expected starts of 1 number or more (got none)");
    check_tensor("starts", of_rows, ScalarType::Long, {rows + 1});
    starts = const_data<int64_t>(of_rows);
    GACT_CHECK_VALUE(std::is_sorted(starts, starts + rows + 1),
                     "Expected starts that do not decrease (got some that do)");
    int64_t span = 0;
    const bool overflow = __builtin_sub_overflow(starts[rows], starts[0], &span);
    GACT_CHECK_VALUE(!overflow && span == edges, "Expected starts that span ", edges,
                     " edges (got ", starts[0], " to ", starts[rows], ")");
  }

  int64_t begin(int64_t row) const { return starts[row] - starts[0]; }
  int64_t count() const { return begin(rows); }

  // The first row that begins at an edge or after it.
  int64_t row_at(int64_t edge) const {
    return std::lower_bound(starts, starts + rows, starts[0] + edge) - starts;
  }

  // The row of an edge.
  int64_t row_of(int64_t edge) const {
    return std::upper_bound(starts, starts + rows, starts[0] + edge) - starts - 1;
  }

  // The number of equal parts of the edges. It is a function of the edges, so that results do not
  // depend on the number of threads.
  int64_t parts() const { return std::clamp<int64_t>(count() / kGrain, 1, kMostParts); }
  int64_t part_begin(int64_t part) const { return count() * part / parts(); }

  // Calls work(row) for each row that begins in a part.
  template <typename Work>
  void for_each_row(int64_t part, const Work& work) const {
    const int64_t end = part + 1 == parts() ? rows : row_at(part_begin(part + 1));
    for (int64_t row = row_at(part_begin(part)); row < end; ++row) work(row);
  }

  const int64_t* starts = nullptr;
  int64_t rows = 0;
};

// Writes the sum of each row: add(sum, row, first, last) adds the edges [first, last) of a row. A
// row whose edges lie in several parts gets the sums of its parts in order.
template <typename scalar_t, typename Add>
void sum_rows(scalar_t* out, int64_t width, const Edges& edges, const Add& add) {
  const int64_t parts = edges.parts();
  std::vector<scalar_t> rest(parts * width);
  for_each_part(parts, [&](int64_t part) {
    const int64_t from = edges.part_begin(part), to = edges.part_begin(part + 1);
    int64_t row = edges.row_at(from);
    if (edges.begin(row) > from) {
      add(rest.data() + part * width, row - 1, from, std::min(to, edges.begin(row)));
    }
    for (; row < edges.rows && (part == parts - 1 || edges.begin(row) < to); ++row) {
      scalar_t* sum = out + row * width;
      std::fill(sum, sum + width, scalar_t(0));
      add(sum, row, edges.begin(row), std::min(to, edges.begin(row + 1)));
    }
  });
  for (int64_t part = 1; part < parts; ++part) {
    const int64_t from = edges.part_begin(part), row = edges.row_at(from);
    if (edges.begin(row) <= from) continue;
    add_scaled(out + (row - 1) * width, rest.data() + part * width, scalar_t(1), width);
  }
}

inline void check_matrix(const char* name, const Tensor& x) {
  check_dim(name, x, 2);
  GACT_CHECK_VALUE(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double,
                   "Expected ", name, " of float32 or float64 (got ", x.scalar_type(), ")");
}

// The heads of weights, which share the columns of a matrix.
struct Heads {
  Heads(const Tensor& x, int64_t heads) : heads(heads), width(x.size(1)) {
    GACT_CHECK_VALUE(heads > 0 && width % heads == 0, "Expected heads that share ", width,
                     " columns evenly (got ", heads, ")");
    each = width / heads;
  }

  int64_t heads;
  int64_t width;
  int64_t each = 0;
};

// The row of each edge in a tensor: a place, or the number of the edge if there are no places.
template <typename index_t>
struct Places {
  // Places in a tensor of `most` rows.
  Places(const char* name, const std::optional<Tensor>& places, int64_t most)
      : name(name), places(places ? const_data<index_t>(*places) : nullptr), most(most) {}

  int64_t operator[](int64_t edge) const {
    const int64_t place = places == nullptr ? edge : static_cast<int64_t>(places[edge]);
    GACT_CHECK_INDEX(0 <= place && place < most, "Expected ", name, " from 0 to ", most - 1,
                     " (got ", place, ")");
    return place;
  }

  const char* name;
  const index_t* places;
  int64_t most;
};

inline ScalarType check_places(const char* name, const Tensor& places) {
  check_dim(name, places, 1);
  const ScalarType kind = places.scalar_type();
  GACT_CHECK_VALUE(kind == ScalarType::Int || kind == ScalarType::Long, "Expected ", name,
                   " of int32 or int64 (got ", kind, ")");
  return kind;
}

// The optional places of rows and of weights, and the number of edges.
struct AllPlaces {
  AllPlaces(const std::optional<Tensor>& of_rows, int64_t rows,
            const std::optional<Tensor>& of_weights = std::nullopt)
      : of_rows(of_rows), of_weights(of_weights) {
    if (of_rows) kind = check_places("places", *of_rows);
    count = of_rows ? of_rows->size(0) : rows;
    if (!of_weights) return;
    const ScalarType dtype = check_places("weight_places", *of_weights);
    if (!of_rows) kind = dtype;
    check_tensor("weight_places", *of_weights, kind, {count});
  }

  std::optional<Tensor> of_rows;
  std::optional<Tensor> of_weights;
  ScalarType kind = ScalarType::Long;
  int64_t count;
};

}  // namespace gact_graph
