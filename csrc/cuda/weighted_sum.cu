// Sums of weighted rows on the GPU, and the gradients of weights: see
// gact_graph/ops/weighted_sum.py, and csrc/cpu/weighted.cpp for the same on the CPU. No message
// is materialized. The gradient of rows is a sum of the same kind, by source.
//
// A lane holds `kEach` adjacent columns of a head.

#include "segments.h"

namespace gact_graph {

template <typename T, int kEach>
struct RowSum {
  using State = Vector<T, kEach>;
  struct Input {
    State row;
    T weight;
  };

  // The columns of a head are a multiple of kEach.
  void take(int64_t unit) {
    column = unit * kEach;
    head = column / each;
  }
  State none() const { return {}; }
  Input read(int64_t, int64_t edge) const {
    const T* row = x + places[edge] * units * kEach + column;
    const T by = weight == nullptr ? T(1) : weight[weight_places[edge] * heads + head];
    return {*reinterpret_cast<const State*>(row), by};
  }
  void add(State& state, const Input& edge) const {
    for (int i = 0; i < kEach; ++i) state.at[i] += edge.weight * edge.row.at[i];
  }
  State merge(const State& a, const State& b) const { return plus(a, b); }
  State result(const State& state) const { return state; }

  int64_t units;
  const T* x;
  Places places;
  const T* weight;  // null: all are 1
  Places weight_places;
  int64_t heads;
  int64_t each;
  int64_t column = 0;
  int64_t head = 0;
};

// A sum, as far as merge_carries() needs it.
template <typename T>
struct Plain {
  using State = Vector<T, 1>;
  State none() const { return {}; }
  State merge(const State& a, const State& b) const { return plus(a, b); }
  int64_t units;
};

// Writes, for each edge and head, the dot product of the edge's rows of x and of `of_sum`.
template <typename T, int kEach>
void dots(const T* of_sum, const T* x, const Places& places, T* out, const Places& out_places,
          int64_t heads, int64_t each, const Edges& edges) {
  using Columns = Vector<T, kEach>;
  const int64_t width = heads * each;
  const auto term = [&](int64_t row, int64_t edge, int64_t column) {
    const auto a = *reinterpret_cast<const Columns*>(of_sum + row * width + column);
    const auto b = *reinterpret_cast<const Columns*>(x + places[edge] * width + column);
    T product = 0;
    for (int i = 0; i < kEach; ++i) product += a.at[i] * b.at[i];
    return product;
  };
  sum_heads<T, kEach>(edges, heads, each, term,
                      [&](int64_t, int64_t edge, int64_t head, T product) {
                        out[out_places[edge] * heads + head] = product;
                      });
}

}  // namespace gact_graph

// Places are three arguments: a pointer, whether they are int64, and the number of rows they index.
#define GACT_SUMS(name, T, kEach)                                                                \
  extern "C" __global__ void GACT_BOUNDS sum_##name##_##kEach(                                   \
      const T* __restrict__ x, const void* __restrict__ places, int64_t wide, int64_t nodes,     \
      const T* __restrict__ weight, const void* __restrict__ weight_places, int64_t weight_wide, \
      int64_t weights, const int64_t* __restrict__ starts, int64_t rows, int64_t count,          \
      int64_t length, int64_t heads, int64_t each, T* __restrict__ out, T* __restrict__ carry) { \
    using Sum = gact_graph::RowSum<T, kEach>;                                                    \
    const Sum sum{heads * each / kEach,                                                          \
                  x,                                                                             \
                  {places, wide, nodes},                                                         \
                  weight,                                                                        \
                  {weight_places, weight_wide, weights},                                         \
                  heads,                                                                         \
                  each};                                                                         \
    gact_graph::reduce_rows(sum, {starts, rows, count, length},                                  \
                            reinterpret_cast<Sum::State*>(out),                                  \
                            reinterpret_cast<Sum::State*>(carry));                               \
  }                                                                                              \
  extern "C" __global__ void GACT_BOUNDS dots_##name##_##kEach(                                  \
      const T* __restrict__ of_sum, const T* __restrict__ x, const void* __restrict__ places,    \
      int64_t wide, int64_t nodes, const int64_t* __restrict__ starts, int64_t rows,             \
      int64_t count, int64_t length, int64_t heads, int64_t each, T* __restrict__ out,           \
      const void* __restrict__ out_places, int64_t out_wide, int64_t weights) {                  \
    gact_graph::dots<T, kEach>(of_sum, x, {places, wide, nodes}, out,                            \
                               {out_places, out_wide, weights}, heads, each,                     \
                               {starts, rows, count, length});                                   \
  }

// The second kernel of each sum of rows of `width` numbers.
#define GACT_CARRIES(name, T)                                                          \
  extern "C" __global__ void GACT_BOUNDS add_carries_##name(                           \
      const int64_t* __restrict__ starts, int64_t rows, int64_t count, int64_t length, \
      int64_t width, T* __restrict__ out, const T* __restrict__ carry) {               \
    using Plain = gact_graph::Plain<T>;                                                \
    gact_graph::merge_carries(Plain{width}, {starts, rows, count, length},             \
                              reinterpret_cast<Plain::State*>(out),                    \
                              reinterpret_cast<const Plain::State*>(carry));           \
  }

GACT_SUMS(float32, float, 1)
GACT_SUMS(float32, float, 2)
GACT_SUMS(float32, float, 4)
GACT_SUMS(float64, double, 1)
GACT_SUMS(float64, double, 2)
GACT_CARRIES(float32, float)
GACT_CARRIES(float64, double)
