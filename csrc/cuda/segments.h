// The edges of rows, divided among warps so that results do not depend on their number.
//
// Edges and row ends form a list, each row's end after its edges, and a segment is an equal part of
// that list (Merrill and Garland, "Merge-based Parallel Sparse Matrix-Vector Multiplication", SC
// 2016), so neither a row with most edges nor many rows without edges delay a warp. A row that ends
// in a later segment than it begins leaves a partial result in each, its carry, and a second kernel
// merges the carries in order. There are no atomic additions.
#pragma once

#include "element.h"
#include "warp.h"

// Registers for 32 warps of a multiprocessor, as in wide_sum.cu; for 24 where NVRTC spills hundreds
// of bytes, not measured.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define GACT_BOUNDS __launch_bounds__(256, 3)
#else
#define GACT_BOUNDS __launch_bounds__(256, 4)
#endif

namespace gact_graph {

// Edges that a lane reads before it uses the first of them, to overlap their latencies.
constexpr int kFlight = 4;

// The row of each edge in a tensor: a place, or the number of the edge if there are no places.
struct Places {
  const void* places;
  int64_t wide;  // whether they are int64 or int32: at run time, to halve the number of kernels
  int64_t most;

  int64_t operator[](int64_t edge) const {
    int64_t place = edge;
    if (places != nullptr) {
      place =
          wide ? static_cast<const int64_t*>(places)[edge] : static_cast<const int*>(places)[edge];
    }
    // As in index_select, an index out of range is a device error.
    if (place < 0 || place >= most) __trap();
    return place;
  }
};

// A position in the list of edges and row ends: the numbers of row ends and of edges before it.
struct Cut {
  int64_t row;
  int64_t edge;
};

// The edges of row r are starts[r] - starts[0] to starts[r + 1] - starts[0].
struct Edges {
  const int64_t* starts;
  int64_t rows;
  int64_t count;
  int64_t length;  // of a segment

  int64_t begin(int64_t row) const {
    const int64_t edge = starts[row] - starts[0];
    if (edge < 0 || edge > count) __trap();
    return edge;
  }
  int64_t segments() const { return (rows + count + length - 1) / length; }

  // The position where a segment begins.
  Cut cut(int64_t segment) const {
    int64_t item = segment * length;
    if (item > rows + count) item = rows + count;
    int64_t first = 0, last = rows;
    while (first < last) {
      const int64_t row = (first + last) / 2;
      if (begin(row + 1) + row < item) {
        first = row + 1;
      } else {
        last = row;
      }
    }
    return {first, item - first};
  }

  // The segment in which a row ends.
  int64_t end_of(int64_t row) const { return (begin(row + 1) + row) / length; }
};

// The division of lanes among the units of a row (`across` adjacent lanes) and edges (groups).
struct Layout {
  explicit Layout(int64_t units) {
    while (across < units && across < kLanes) across *= 2;
    chunks = (units + across - 1) / across;
  }
  int beside() const { return lane_of_thread() % across; }
  int group() const { return lane_of_thread() / across; }
  int groups() const { return kLanes / across; }

  int across = 1;
  int64_t chunks;  // parts of a row, each for another warp
};

template <typename T, int kCount>
Vector<T, kCount> from_lane(Vector<T, kCount> x, int far) {
  for (int i = 0; i < kCount; ++i) x.at[i] = __shfl_xor_sync(kAllLanes, x.at[i], far);
  return x;
}

template <typename T, int kCount>
Vector<T, kCount> plus(Vector<T, kCount> a, Vector<T, kCount> b) {
  for (int i = 0; i < kCount; ++i) a.at[i] += b.at[i];
  return a;
}

// Adds this lane's edges of [first, last) to a state.
//
// A reduction has the types State, a Vector, and Input, which is read for each edge. A row has
// `units` states; take(unit) selects one; none() is the state of no edges; merge(a, b) combines two
// states and is commutative.
template <typename Reduction>
void reduce(const Reduction& own, const Layout& layout, int64_t row, int64_t first, int64_t last,
            typename Reduction::State& state) {
  const int groups = layout.groups();
  int64_t edge = first + layout.group();
  for (; edge + (kFlight - 1) * groups < last; edge += kFlight * groups) {
    typename Reduction::Input inputs[kFlight];
    for (int i = 0; i < kFlight; ++i) inputs[i] = own.read(row, edge + i * groups);
    for (int i = 0; i < kFlight; ++i) own.add(state, inputs[i]);
  }
  for (; edge < last; edge += groups) own.add(state, own.read(row, edge));
}

// Merges the states of all groups of lanes.
template <typename Reduction>
void merge_groups(const Reduction& own, const Layout& layout, typename Reduction::State& state) {
  for (int far = layout.across; far < kLanes; far *= 2) {
    state = own.merge(state, from_lane(state, far));
  }
}

// Calls work(segment, reduction, layout, unit, mine) for each segment and each unit of a row, by
// all lanes of a warp; a lane without a unit takes part with the last unit and writes nothing.
template <typename Reduction, typename Work>
void for_each_segment(const Reduction& reduction, int64_t segments, const Work& work) {
  const Layout layout(reduction.units);
  for (int64_t w = warp_of_thread(); w < segments * layout.chunks; w += warps_of_grid()) {
    const int64_t unit = w % layout.chunks * layout.across + layout.beside();
    const bool within = unit < reduction.units;
    Reduction own = reduction;
    own.take(within ? unit : reduction.units - 1);
    work(w / layout.chunks, own, layout, unit, within && layout.group() == 0);
  }
}

// Calls work(row, first, last, whole) for the edges of each row in a segment; whole: whether the
// row ends there.
template <typename Work>
void for_each_row(const Edges& edges, int64_t segment, const Work& work) {
  const Cut from = edges.cut(segment), to = edges.cut(segment + 1);
  int64_t edge = from.edge;
  for (int64_t row = from.row; row < to.row; ++row) {
    const int64_t last = edges.begin(row + 1);
    work(row, edge, last, true);
    edge = last;
  }
  if (edge < to.edge) work(to.row, edge, to.edge, false);
}

// Writes the state of each row's edges in the segment in which the row ends, and all carries
// [segments, units], for merge_carries().
template <typename Reduction>
void reduce_rows(const Reduction& reduction, const Edges& edges,
                 typename Reduction::State* __restrict__ out,
                 typename Reduction::State* __restrict__ carry) {
  for_each_segment(
      reduction, edges.segments(),
      [&](int64_t segment, const Reduction& own, const Layout& layout, int64_t unit, bool writes) {
        for_each_row(edges, segment, [&](int64_t row, int64_t first, int64_t last, bool whole) {
          auto state = own.none();
          reduce(own, layout, row, first, last, state);
          merge_groups(own, layout, state);
          if (writes) {
            (whole ? out[row * own.units + unit] : carry[segment * own.units + unit]) =
                own.result(state);
          }
        });
      });
}

// Writes the state of all edges of each segment [segments, units], over all rows.
template <typename Reduction>
void reduce_segments(const Reduction& reduction, const Edges& edges,
                     typename Reduction::State* __restrict__ out) {
  for_each_segment(
      reduction, edges.segments(),
      [&](int64_t segment, const Reduction& own, const Layout& layout, int64_t unit, bool writes) {
        auto state = own.none();
        for_each_row(edges, segment, [&](int64_t row, int64_t first, int64_t last, bool) {
          reduce(own, layout, row, first, last, state);
        });
        merge_groups(own, layout, state);
        if (writes) out[segment * own.units + unit] = own.result(state);
      });
}

// A reduction over the carries of a row in place of its edges.
template <typename Reduction>
struct Carries : Reduction {
  using State = typename Reduction::State;
  using Input = State;

  void take(int64_t own) { unit = own; }
  Input read(int64_t, int64_t segment) const { return carry[segment * this->units + unit]; }
  void add(State& state, const Input& carried) const { state = this->merge(state, carried); }

  const State* carry;
  int64_t unit = 0;
};

// Merges the carries of each row with its state in the segment in which it ends.
template <typename Reduction>
void merge_carries(const Reduction& reduction, const Edges& edges,
                   typename Reduction::State* __restrict__ out,
                   const typename Reduction::State* __restrict__ carry) {
  const Carries<Reduction> all{reduction, carry};
  for_each_segment(all, edges.segments(),
                   [&](int64_t segment, const Carries<Reduction>& own, const Layout& layout,
                       int64_t unit, bool writes) {
                     const Cut from = edges.cut(segment), to = edges.cut(segment + 1);
                     if (to.row == edges.rows) return;
                     const int64_t first = edges.begin(to.row);
                     // Only the segment with the row's first edge but not its end.
                     if (first < from.edge || first >= to.edge) return;
                     auto state = own.none();
                     reduce(own, layout, to.row, segment, edges.end_of(to.row), state);
                     merge_groups(own, layout, state);
                     auto& whole = out[to.row * own.units + unit];
                     if (writes) whole = own.merge(state, whole);
                   });
}

// Calls work(row, edge, head, within) for each edge and head. `across` adjacent lanes get the same
// edge and head; all lanes of a warp take part, those without work with `within` false.
template <typename Work>
void for_each_head(const Edges& edges, int64_t heads, const Layout& layout, const Work& work) {
  const auto divisor = static_cast<uint32_t>(heads);
  const int64_t segments = edges.segments();
  for (int64_t segment = warp_of_thread(); segment < segments; segment += warps_of_grid()) {
    for_each_row(edges, segment, [&](int64_t row, int64_t first, int64_t last, bool) {
      // The edges of a segment fit in 32 bits.
      const auto count = static_cast<uint32_t>((last - first) * heads);
      for (uint32_t base = 0; base < count; base += layout.groups()) {
        const uint32_t pair = base + layout.group();
        const bool within = pair < count;
        const uint32_t own = within ? pair : base;
        work(row, first + own / divisor, static_cast<int64_t>(own % divisor), within);
      }
    });
  }
}

// Calls store(row, edge, head, sum) once for each edge and head, with the sum of
// term(row, edge, column) over the head's `each` columns, kEach at a time.
template <typename T, int kEach, typename Term, typename Store>
void sum_heads(const Edges& edges, int64_t heads, int64_t each, const Term& term,
               const Store& store) {
  const Layout layout(each / kEach);
  for_each_head(edges, heads, layout, [&](int64_t row, int64_t edge, int64_t head, bool within) {
    T sum = 0;
    for (int64_t c = layout.beside() * kEach; c < each; c += layout.across * kEach) {
      sum += term(row, edge, head * each + c);
    }
    for (int far = 1; far < layout.across; far *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, far);
    }
    if (within && layout.beside() == 0) store(row, edge, head, sum);
  });
}

}  // namespace gact_graph
