// Sums of weighted rows that are at least as wide as a warp, and their gradients: see
// gact_graph/ops/weighted_sum.py. Compiled for the number of vectors of 16 bytes that a lane holds
// of a row, GACT_BITS. A warp reads the places of 32 edges with one load, and goes on from row to
// row, so that short rows leave as many loads in flight as long ones.
#include "segments.h"

namespace gact_graph {

template <typename T>
struct WideRows {
  const T* x;
  Places places;
  const T* weight;
  Places weight_places;
  int64_t heads;
  int64_t each;  // columns of a head
};

// The columns of a lane: kSpan vectors, each one warp apart from the next. A lane beyond the last
// unit reads that unit again, and writes nothing.
template <int kEach, int kSpan>
struct Span {
  Span(int first, int units, int across) {
    for (int s = 0; s < kSpan; ++s) {
      const int unit = first + s * kLanes + lane_of_thread();
      within[s] = unit < units;
      column[s] = (within[s] ? unit : units - 1) * kEach;
      head[s] = column[s] / kEach / across;
    }
  }
  template <typename T>
  void load(const T* row, Vector<T, kEach> (&values)[kSpan]) const {
    for (int s = 0; s < kSpan; ++s) {
      values[s] = *reinterpret_cast<const Vector<T, kEach>*>(row + column[s]);
    }
  }
  template <typename T>
  void store(const Vector<T, kEach> (&values)[kSpan], T* row) const {
    for (int s = 0; s < kSpan; ++s) {
      if (within[s]) *reinterpret_cast<Vector<T, kEach>*>(row + column[s]) = values[s];
    }
  }

  bool within[kSpan];
  int column[kSpan];
  int head[kSpan];
};

// Writes, for each head, the dot product of two rows to `out`. A head has `across` lanes of one
// vector; or, where it is the only one, all vectors of all lanes.
template <typename T, int kEach, int kSpan>
void write_dots(const Vector<T, kEach> (&a)[kSpan], const Vector<T, kEach> (&b)[kSpan],
                const Span<kEach, kSpan>& span, int across, T* out) {
  T sums[kSpan];
  for (int s = 0; s < kSpan; ++s) {
    sums[s] = 0;
    for (int i = 0; i < kEach; ++i) sums[s] += a[s].at[i] * b[s].at[i];
    if (!span.within[s]) sums[s] = 0;
  }
  if (across > kLanes) {
    for (int s = 1; s < kSpan; ++s) sums[0] += sums[s];
  }
  const int lanes = across < kLanes ? across : kLanes, beside = lane_of_thread() % lanes;
  for (int far = 1; far < lanes; far *= 2) {
    for (int s = 0; s < kSpan; ++s) {
      const T further = __shfl_down_sync(kAllLanes, sums[s], far);
      if (beside + far < lanes) sums[s] += further;
    }
  }
  if (beside) return;
  for (int s = 0; s < kSpan; ++s) {
    if (span.within[s] && (s == 0 || across <= kLanes)) out[span.head[s]] = sums[s];
  }
}

// Writes the sum of each row's edges in the segment in which the row ends, and all carries
// [segments, width], as reduce_rows(); with kDots also, at the place of each edge's weight, the dot
// product of its row of x and its own row of `of_sum` for each head.
template <bool kDots, int kEach, int kSpan, typename T>
void sum_wide_rows(const WideRows<T>& all, const Edges& edges, T* __restrict__ out,
                   T* __restrict__ carry, const T* __restrict__ of_sum, T* __restrict__ of_weight) {
  using Columns = Vector<T, kEach>;
  constexpr int kAhead = kSpan == 1 ? 4 : 2;  // edges whose rows are in flight
  const auto width = static_cast<int>(all.heads * all.each), units = width / kEach;
  const auto across = static_cast<int>(all.each / kEach);
  const int chunks = (units + kLanes * kSpan - 1) / (kLanes * kSpan);
  for (int64_t w = warp_of_thread(); w < edges.segments() * chunks; w += warps_of_grid()) {
    const int64_t segment = w / chunks;
    const Span<kEach, kSpan> span(static_cast<int>(w % chunks) * kLanes * kSpan, units, across);
    const Cut from = edges.cut(segment), to = edges.cut(segment + 1);
    // Rows and edges are counted from the segment's first; both of a segment fit in 32 bits.
    const auto ends = static_cast<int>(to.row - from.row);
    const auto count = static_cast<int>(to.edge - from.edge);
    int row = 0, done = 0, end = -1;
    Columns sums[kSpan] = {}, own[kSpan];
    const auto begin = [&] {
      end = row < ends ? static_cast<int>(edges.begin(from.row + row + 1) - from.edge) : -1;
      if (kDots && from.row + row < edges.rows) span.load(of_sum + (from.row + row) * width, own);
    };
    const auto finish = [&] {
      span.store(sums, out + (from.row + row) * width);
      for (int s = 0; s < kSpan; ++s) sums[s] = {};
      done = end;
      ++row;
      begin();
    };
    begin();
    for (int base = 0; base < count; base += kLanes) {
      const bool has = base + lane_of_thread() < count;
      const int64_t mine = from.edge + base + lane_of_thread();
      const auto place = static_cast<uint32_t>(has ? all.places[mine] : 0);
      const auto weight_place = static_cast<uint32_t>(has ? all.weight_places[mine] : 0);
      const int last = count - base < kLanes ? count - base : kLanes;
      for (int first = 0; first < last; first += kAhead) {
        Columns rows[kAhead][kSpan];
        T by[kAhead][kSpan];
        for (int i = 0; i < kAhead; ++i) {
          if (first + i >= last) break;
          span.load(all.x + static_cast<int64_t>(__shfl_sync(kAllLanes, place, first + i)) * width,
                    rows[i]);
          const T* weights =
              all.weight + __shfl_sync(kAllLanes, weight_place, first + i) * all.heads;
          for (int s = 0; s < kSpan; ++s) by[i][s] = weights[span.head[s]];
        }
        for (int i = 0; i < kAhead; ++i) {
          if (first + i >= last) break;
          while (base + first + i == end) finish();
          for (int s = 0; s < kSpan; ++s) {
            for (int c = 0; c < kEach; ++c) sums[s].at[c] += by[i][s] * rows[i][s].at[c];
          }
          if constexpr (kDots) {
            const uint32_t at = __shfl_sync(kAllLanes, weight_place, first + i);
            write_dots(own, rows[i], span, across, of_weight + at * all.heads);
          }
        }
      }
    }
    while (row < ends) finish();
    if (done < count) span.store(sums, carry + segment * width);
  }
}

}  // namespace gact_graph

// Registers for so many blocks at a time: measured on an H200, where more warps gain more than a
// few spilled registers lose.
#define GACT_WIDE_BOUNDS __launch_bounds__(256, GACT_BITS == 1 ? 4 : GACT_BITS == 2 ? 3 : 2)

// `wide_backward` also writes the gradients of weights.
#define GACT_WIDE(name, T, kEach)                                                                  \
  extern "C" __global__ void GACT_WIDE_BOUNDS wide_sum_##name(                                     \
      const T* __restrict__ x, const void* __restrict__ places, int64_t wide, int64_t nodes,       \
      const T* __restrict__ weight, const void* __restrict__ weight_places, int64_t weight_wide,   \
      int64_t weights, const int64_t* __restrict__ starts, int64_t rows, int64_t count,            \
      int64_t length, int64_t heads, int64_t each, T* __restrict__ out, T* __restrict__ carry) {   \
    const gact_graph::WideRows<T> all = {                                                          \
        x, {places, wide, nodes}, weight, {weight_places, weight_wide, weights}, heads, each};     \
    gact_graph::sum_wide_rows<false, kEach, GACT_BITS, T>(all, {starts, rows, count, length}, out, \
                                                          carry, nullptr, nullptr);                \
  }                                                                                                \
  extern "C" __global__ void GACT_WIDE_BOUNDS wide_backward_##name(                                \
      const T* __restrict__ x, const void* __restrict__ places, int64_t wide, int64_t nodes,       \
      const T* __restrict__ weight, const void* __restrict__ weight_places, int64_t weight_wide,   \
      int64_t weights, const int64_t* __restrict__ starts, int64_t rows, int64_t count,            \
      int64_t length, int64_t heads, int64_t each, T* __restrict__ out, T* __restrict__ carry,     \
      const T* __restrict__ of_sum, T* __restrict__ of_weight) {                                   \
    const gact_graph::WideRows<T> all = {                                                          \
        x, {places, wide, nodes}, weight, {weight_places, weight_wide, weights}, heads, each};     \
    gact_graph::sum_wide_rows<true, kEach, GACT_BITS, T>(all, {starts, rows, count, length}, out,  \
                                                         carry, of_sum, of_weight);                \
  }

GACT_WIDE(float32, float, 4)
GACT_WIDE(float64, double, 2)
