// Sums of weighted rows on the CPU, and their gradients: see gact_graph/weighted.py.
// No row of a message is ever written: it is used as soon as it is known.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

namespace gact_graph {
namespace {

// Arcs whose rows are fetched ahead: they lie anywhere.
constexpr int64_t kAhead = 4;

// Arcs below which a thread more gains nothing.
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
scalar_t dot(const scalar_t* one, const scalar_t* other, int64_t count) {
  scalar_t found = 0;
#pragma omp simd reduction(+ : found)
  for (int64_t i = 0; i < count; ++i) found += one[i] * other[i];
  return found;
}

// The arcs of rows: those of row r are starts[r] - starts[0] to starts[r + 1] - starts[0].
struct Arcs {
  explicit Arcs(const at::Tensor& starts)
      : starts(starts.const_data_ptr<int64_t>()), rows(starts.numel() - 1) {}

  int64_t begin(int64_t row) const { return starts[row] - starts[0]; }
  int64_t count() const { return begin(rows); }

  // The first row that begins at this arc or after it.
  int64_t row_at(int64_t arc) const {
    return std::lower_bound(starts, starts + rows, starts[0] + arc) - starts;
  }

  // Calls work(row) for each row, the arcs shared out evenly among threads.
  template <typename Work>
  void for_each_row(const Work& work) const {
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(64, count() / kGrain));
    at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
      const int64_t from = first == 0 ? 0 : row_at(count() * first / parts);
      const int64_t to = last == parts ? rows : row_at(count() * last / parts);
      for (int64_t row = from; row < to; ++row) work(row);
    });
  }

  const int64_t* starts;
  int64_t rows;
};

// Where the row of an arc lies: at a place, or in the order of arcs where there are no places.
template <typename index_t>
struct Places {
  Places(const std::optional<at::Tensor>& places, int64_t rows)
      : places(places ? places->const_data_ptr<index_t>() : nullptr), rows(rows) {}

  int64_t operator[](int64_t arc) const {
    const int64_t place = places == nullptr ? arc : static_cast<int64_t>(places[arc]);
    TORCH_CHECK_INDEX(0 <= place && place < rows, "Expected places from 0 to ", rows - 1, " (got ",
                      place, ")");
    return place;
  }

  const index_t* places;
  int64_t rows;
};

void weighted_sum(at::Tensor& out, const at::Tensor& x, const std::optional<at::Tensor>& places,
                  const at::Tensor& weight, const at::Tensor& starts) {
  const Arcs arcs(starts);
  const int64_t heads = weight.size(1), width = x.size(1), each = width / heads;
  const auto kind = places ? places->scalar_type() : at::kLong;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "weighted_sum", [&] {
    AT_DISPATCH_INDEX_TYPES(kind, "weighted_sum", [&] {
      const Places<index_t> place(places, x.size(0));
      const scalar_t* from = x.const_data_ptr<scalar_t>();
      const scalar_t* w = weight.const_data_ptr<scalar_t>();
      scalar_t* to = out.mutable_data_ptr<scalar_t>();
      const int64_t count = arcs.count();
      arcs.for_each_row([&](int64_t row) {
        scalar_t* sum = to + row * width;
        std::fill(sum, sum + width, scalar_t(0));
        for (int64_t arc = arcs.begin(row); arc < arcs.begin(row + 1); ++arc) {
          if (arc + kAhead < count) prefetch(from + place[arc + kAhead] * width, width);
          const scalar_t* own = from + place[arc] * width;
          for (int64_t head = 0; head < heads; ++head) {
            add_scaled(sum + head * each, own + head * each, w[arc * heads + head], each);
          }
        }
      });
    });
  });
}

at::Tensor weighted_sum_weights(const at::Tensor& gradient, const at::Tensor& x,
                                const std::optional<at::Tensor>& places, const at::Tensor& starts,
                                int64_t heads) {
  const Arcs arcs(starts);
  const int64_t width = x.size(1), each = width / heads;
  at::Tensor found = at::empty({arcs.count(), heads}, x.options());
  const auto kind = places ? places->scalar_type() : at::kLong;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "weighted_sum_weights", [&] {
    AT_DISPATCH_INDEX_TYPES(kind, "weighted_sum_weights", [&] {
      const Places<index_t> place(places, x.size(0));
      const scalar_t* of_sum = gradient.const_data_ptr<scalar_t>();
      const scalar_t* from = x.const_data_ptr<scalar_t>();
      scalar_t* to = found.mutable_data_ptr<scalar_t>();
      const int64_t count = arcs.count();
      arcs.for_each_row([&](int64_t row) {
        const scalar_t* sum = of_sum + row * width;
        for (int64_t arc = arcs.begin(row); arc < arcs.begin(row + 1); ++arc) {
          if (arc + kAhead < count) prefetch(from + place[arc + kAhead] * width, width);
          const scalar_t* own = from + place[arc] * width;
          for (int64_t head = 0; head < heads; ++head) {
            to[arc * heads + head] = dot(sum + head * each, own + head * each, each);
          }
        }
      });
    });
  });
  return found;
}

void weighted_sum_rows(at::Tensor& total, const at::Tensor& gradient, const at::Tensor& places,
                       const at::Tensor& weight, const at::Tensor& starts) {
  const Arcs arcs(starts);
  const int64_t heads = weight.size(1), width = total.size(1), each = width / heads;
  AT_DISPATCH_FLOATING_TYPES(total.scalar_type(), "weighted_sum_rows", [&] {
    AT_DISPATCH_INDEX_TYPES(places.scalar_type(), "weighted_sum_rows", [&] {
      const Places<index_t> place(places, total.size(0));
      const scalar_t* of_sum = gradient.const_data_ptr<scalar_t>();
      const scalar_t* w = weight.const_data_ptr<scalar_t>();
      scalar_t* to = total.mutable_data_ptr<scalar_t>();
      const int64_t count = arcs.count();
      const int64_t most = std::max<int64_t>(1, count / kGrain);
      const int64_t parts = std::min<int64_t>(at::get_num_threads(), most);
      // Arcs of other rows may add to the same place: each has one part of the work that does, and
      // gets what is added in the order of the arcs, however many parts there are.
      at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
        for (int64_t row = 0; row < arcs.rows; ++row) {
          const scalar_t* sum = of_sum + row * width;
          for (int64_t arc = arcs.begin(row); arc < arcs.begin(row + 1); ++arc) {
            const auto is_own = [&](int64_t at) {
              const int64_t part = place[at] % parts;
              return first <= part && part < last;
            };
            if (arc + kAhead < count && is_own(arc + kAhead)) {
              prefetch(to + place[arc + kAhead] * width, width);
            }
            if (!is_own(arc)) continue;
            scalar_t* own = to + place[arc] * width;
            for (int64_t head = 0; head < heads; ++head) {
              add_scaled(own + head * each, sum + head * each, w[arc * heads + head], each);
            }
          }
        }
      });
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def(
      "weighted_sum(Tensor(a!) out, Tensor x, Tensor? places, Tensor weight, Tensor starts) -> ()",
      &weighted_sum);
  library.def(
      "weighted_sum_weights(Tensor gradient, Tensor x, Tensor? places, Tensor starts, int heads)"
      " -> Tensor",
      &weighted_sum_weights);
  library.def(
      "weighted_sum_rows(Tensor(a!) total, Tensor gradient, Tensor places, Tensor weight,"
      " Tensor starts) -> ()",
      &weighted_sum_rows);
}

}  // namespace gact_graph
