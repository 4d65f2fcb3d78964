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
  Span(int64_t first, int64_t units, int64_t each) {
    for (int s = 0; s < kSpan; ++s) {
      const int64_t unit = first + s * kLanes + lane_of_thread();
      within[s] = unit < units;
      column[s] = (within[s] ? unit : units - 1) * kEach;
      head[s] = static_cast<int>(column[s] / each);
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
  int64_t column[kSpan];
  int head[kSpan];
};

// Writes, for each head, the dot product of two rows to `out`. A head has the lanes of a warp, all
// spans of which then belong to it, or a power of two of them.
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
  for (int far = 1; far < across && far < kLanes; far *= 2) {
    for (int s = 0; s < kSpan; ++s) sums[s] += __shfl_xor_sync(kAllLanes, sums[s], far);
  }
  if (lane_of_thread() % (across < kLanes ? across : kLanes)) return;
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
  constexpr int kAhead = kSpan == 1 ? 8 : kSpan == 2 ? 4 : 2;  // edges whose rows are in flight
  const int64_t width = all.heads * all.each, units = width / kEach;
  const int64_t chunks = (units + kLanes * kSpan - 1) / (kLanes * kSpan);
  const int across = static_cast<int>(all.each / kEach);
  for (int64_t w = warp_of_thread(); w < edges.segments() * chunks; w += warps_of_grid()) {
    const int64_t segment = w / chunks;
    const Span<kEach, kSpan> span(w % chunks * kLanes * kSpan, units, all.each);
    const Cut from = edges.cut(segment), to = edges.cut(segment + 1);
    int64_t row = from.row, done = from.edge, end;
    Columns sums[kSpan] = {}, own[kSpan];
    const auto begin = [&] {
      end = row < to.row ? edges.begin(row + 1) : -1;
      if (kDots && row < edges.rows) span.load(of_sum + row * width, own);
    };
    const auto finish = [&] {
      span.store(sums, out + row * width);
      for (int s = 0; s < kSpan; ++s) sums[s] = {};
      done = end;
      ++row;
      begin();
    };
    begin();
    for (int64_t base = from.edge; base < to.edge; base += kLanes) {
      const int64_t mine = base + lane_of_thread();
      const auto place = static_cast<uint32_t>(mine < to.edge ? all.places[mine] : 0);
      const auto weight_place = static_cast<uint32_t>(mine < to.edge ? all.weight_places[mine] : 0);
      const int count = to.edge - base < kLanes ? static_cast<int>(to.edge - base) : kLanes;
      for (int first = 0; first < count; first += kAhead) {
        Columns rows[kAhead][kSpan];
        T by[kAhead][kSpan];
        int64_t weights[kAhead];
        for (int i = 0; i < kAhead; ++i) {
          if (first + i >= count) break;
          const int64_t source = __shfl_sync(kAllLanes, place, first + i);
          span.load(all.x + source * width, rows[i]);
          weights[i] = __shfl_sync(kAllLanes, weight_place, first + i) * all.heads;
          for (int s = 0; s < kSpan; ++s) {
            by[i][s] = all.weight == nullptr ? T(1) : all.weight[weights[i] + span.head[s]];
          }
        }
        for (int i = 0; i < kAhead; ++i) {
          if (first + i >= count) break;
          while (base + first + i == end) finish();
          for (int s = 0; s < kSpan; ++s) {
            for (int c = 0; c < kEach; ++c) sums[s].at[c] += by[i][s] * rows[i][s].at[c];
          }
          if constexpr (kDots) write_dots(own, rows[i], span, across, of_weight + weights[i]);
        }
      }
    }
    while (row < to.row) finish();
    if (done < to.edge) span.store(sums, carry + segment * width);
  }
}

}  // namespace gact_graph

// `wide_backward` also writes the gradients of weights.
#define GACT_WIDE(name, T, kEach)                                                                  \
  extern "C" __global__ void wide_sum_##name(                                                      \
      const T* __restrict__ x, const void* __restrict__ places, int64_t wide, int64_t nodes,       \
      const T* __restrict__ weight, const void* __restrict__ weight_places, int64_t weight_wide,   \
      int64_t weights, const int64_t* __restrict__ starts, int64_t rows, int64_t count,            \
      int64_t length, int64_t heads, int64_t each, T* __restrict__ out, T* __restrict__ carry) {   \
    const gact_graph::WideRows<T> all = {                                                          \
        x, {places, wide, nodes}, weight, {weight_places, weight_wide, weights}, heads, each};     \
    gact_graph::sum_wide_rows<false, kEach, GACT_BITS, T>(all, {starts, rows, count, length}, out, \
                                                          carry, nullptr, nullptr);                \
  }                                                                                                \
  extern "C" __global__ void wide_backward_##name(                                                 \
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
