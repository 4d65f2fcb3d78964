// The edges of rows, shared out among warps so that no result depends on how many there are.
//
// Edges and the ends of rows make one list, each row's end behind its edges, and a segment is an
// equal part of that list (Merrill and Garland, "Merge-based Parallel Sparse Matrix-Vector
// Multiplication", SC 2016): neither a row of most edges nor many rows of none make a warp late. A
// row that ends in a later segment than it begins leaves what each segment found, its carry, and a
// second kernel puts these together in their order. Nothing is added by atomics.
#pragma once

#include "element.h"
#include "warp.h"

namespace gact_graph {

// Edges that a lane reads before it uses the first of them: their rows lie anywhere.
constexpr int kFlight = 4;

// Where something of each edge lies: at a place, or in the order of edges where there are none.
struct Places {
  const void* places;
  int64_t wide;  // whether they are int64, not int32: less to read than a template for each is
  int64_t most;

  int64_t operator[](int64_t edge) const {
    int64_t place = edge;
    if (places != nullptr) {
      place =
          wide ? static_cast<const int64_t*>(places)[edge] : static_cast<const int*>(places)[edge];
    }
    // As index_select: a wrong place is an error of the device.
    if (place < 0 || place >= most) __trap();
    return place;
  }
};

// A place in the list of edges and ends: so many rows have ended, and so many edges lie before it.
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

  // Where a segment begins.
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

// How lanes share rows of so many units: some lie side by side, the others take further edges.
struct Layout {
  explicit Layout(int64_t units) {
    while (across < units && across < kLanes) across *= 2;
    chunks = (units + across - 1) / across;
  }
  int beside() const { return lane_of_thread() % across; }
  int group() const { return lane_of_thread() / across; }
  int groups() const { return kLanes / across; }

  int across = 1;
  int64_t chunks;  // of a row, each for a warp of its own
};

template <typename T, int kCount>
Vector<T, kCount> from_lane(Vector<T, kCount> x, int far) {
  for (int i = 0; i < kCount; ++i) x.at[i] = __shfl_xor_sync(kAllLanes, x.at[i], far);
  return x;
}

template <typename T, int kCount>
Vector<T, kCount> plus(Vector<T, kCount> one, Vector<T, kCount> other) {
  for (int i = 0; i < kCount; ++i) one.at[i] += other.at[i];
  return one;
}

// Adds the edges from one to another, as many as fall to this lane, to a state.
//
// A reduction has the types State, a Vector, and Given, what it reads of an edge; `units` states a
// row; take(unit) says which is meant; none() is the state of no edges; merge(one, other) is that
// of both, the same in either order.
template <typename Reduction>
void reduce(const Reduction& own, const Layout& layout, int64_t row, int64_t first, int64_t last,
            typename Reduction::State& state) {
  const int groups = layout.groups();
  int64_t edge = first + layout.group();
  for (; edge + (kFlight - 1) * groups < last; edge += kFlight * groups) {
    typename Reduction::Given given[kFlight];
    for (int i = 0; i < kFlight; ++i) given[i] = own.read(row, edge + i * groups);
    for (int i = 0; i < kFlight; ++i) own.add(state, given[i]);
  }
  for (; edge < last; edge += groups) own.add(state, own.read(row, edge));
}

// What all groups of lanes found.
template <typename Reduction>
void merge_groups(const Reduction& own, const Layout& layout, typename Reduction::State& state) {
  for (int far = layout.across; far < kLanes; far *= 2) {
    state = own.merge(state, from_lane(state, far));
  }
}

// Calls work(segment, reduction, layout, unit, mine) for each segment and each unit of a row, by
// all lanes of a warp; a lane without a unit of its own goes along with another one's.
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

// Writes the state of each row that ends in the segment that it ends in, and all carries
// [segments, units]: for merge_carries().
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

// Writes the state of all edges of each segment [segments, units], whatever their rows.
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

// The carries of one row as if they were its edges.
template <typename Reduction>
struct Carries : Reduction {
  using State = typename Reduction::State;
  using Given = State;

  void take(int64_t own) { unit = own; }
  Given read(int64_t, int64_t segment) const { return carry[segment * this->units + unit]; }
  void add(State& state, const Given& given) const { state = this->merge(state, given); }

  const State* carry;
  int64_t unit = 0;
};

// Merges the carries of each row that has some with what the segment found in which it ends.
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
                     // The segment that has the row's first edge, and not its end.
                     if (first < from.edge || first >= to.edge) return;
                     auto state = own.none();
                     reduce(own, layout, to.row, segment, edges.end_of(to.row), state);
                     merge_groups(own, layout, state);
                     auto& whole = out[to.row * own.units + unit];
                     if (writes) whole = own.merge(state, whole);
                   });
}

// Calls work(row, edge, head, within) for each edge and head. `across` lanes that lie side by side
// get the same of both; all lanes of a warp come along, also those for which nothing is left.
template <typename Work>
void for_each_head(const Edges& edges, int64_t heads, const Layout& layout, const Work& work) {
  const auto divisor = static_cast<uint32_t>(heads);
  const int64_t segments = edges.segments();
  for (int64_t segment = warp_of_thread(); segment < segments; segment += warps_of_grid()) {
    for_each_row(edges, segment, [&](int64_t row, int64_t first, int64_t last, bool) {
      // Of a segment, so that 32 bits count them.
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

// Calls store(row, edge, head, sum) once for each edge and head, with the sum of what
// term(row, edge, column) gives for every kEach columns of the head's `each`.
template <typename T, int kEach, typename Term, typename Store>
void sum_heads(const Edges& edges, int64_t heads, int64_t each, const Term& term,
               const Store& store) {
  const Layout layout(each / kEach);
  for_each_head(edges, heads, layout, [&](int64_t row, int64_t edge, int64_t head, bool within) {
    T found = 0;
    for (int64_t c = layout.beside() * kEach; c < each; c += layout.across * kEach) {
      found += term(row, edge, head * each + c);
    }
    for (int far = 1; far < layout.across; far *= 2) {
      found += __shfl_xor_sync(kAllLanes, found, far);
    }
    if (within && layout.beside() == 0) store(row, edge, head, found);
  });
}

}  // namespace gact_graph
