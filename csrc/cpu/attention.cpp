// Attention weights from the scores of nodes on the CPU, and their gradients: see
// gact_graph/ops/attention.py. The scores of edges live no longer than their row is worked on.

#include <ATen/Dispatch.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>

#include "../noise.h"
#include "edges.h"

namespace gact_graph {
namespace {

// What dropout multiplies weights by: a pure function of the seed and the place of a weight.
struct Dropout {
  Dropout(double share, int64_t seed) : seed(static_cast<uint64_t>(seed)) {
    TORCH_CHECK_VALUE(0 <= share && share < 1, "Expected dropout from 0 to less than 1 (got ",
                      share, ")");
    // In steps of 2^-16. What is left is scaled by the share that is left, so that nothing is lost
    // on average.
    dropped = static_cast<uint32_t>(std::min(std::lrint(share * 65536), 65535L));
    scale = 65536.0 / (65536 - dropped);
  }

  double operator()(int64_t place) const {
    if (dropped == 0) return 1;
    const auto index = static_cast<uint64_t>(place);
    const uint32_t noise = noise16(static_cast<uint32_t>(index), noise_key(seed, index));
    return noise < dropped ? 0 : scale;
  }

  uint64_t seed;
  uint32_t dropped;
  double scale;
};

// What forward and backward are given.
struct Given {
  Given(const at::Tensor& source, const at::Tensor& destination, const at::Tensor& places,
        const std::optional<at::Tensor>& weight_places, const at::Tensor& starts)
      : source(source),
        destination(destination),
        all(places, 0, weight_places),
        edges(starts, all.count) {
    check_matrix("source", source);
    heads = source.size(1);
    check_tensor("destination", destination, source.scalar_type(), {edges.rows, heads});
  }

  const at::Tensor& source;
  const at::Tensor& destination;
  AllPlaces all;
  Edges edges;
  int64_t heads = 0;
};

// The attention of the edges of one row, before dropout.
template <typename scalar_t, typename index_t>
struct Row {
  Row(const Given& given, double slope)
      : edges(given.edges),
        place("places", given.all.of_rows, given.source.size(0)),
        source(given.source.const_data_ptr<scalar_t>()),
        destination(given.destination.const_data_ptr<scalar_t>()),
        heads(given.heads),
        slope(static_cast<scalar_t>(slope)),
        most(heads),
        sum(heads) {}

  scalar_t score(int64_t row, int64_t edge, int64_t head) const {
    return source[place[edge] * heads + head] + destination[row * heads + head];
  }

  // Fills `weight` [edges, heads].
  void find(int64_t row) {
    const int64_t first = edges.begin(row), last = edges.begin(row + 1);
    weight.resize((last - first) * heads);
    most.assign(heads, -std::numeric_limits<scalar_t>::infinity());
    sum.assign(heads, 0);
    scalar_t* to = weight.data();
    for (int64_t edge = first; edge < last; ++edge) {
      if (edge + kAhead < edges.count()) {
        __builtin_prefetch(source + place[edge + kAhead] * heads);
      }
      for (int64_t head = 0; head < heads; ++head) {
        const scalar_t found = score(row, edge, head);
        *to = found > 0 ? found : found * slope;
        most[head] = std::max(most[head], *to++);
      }
    }
    to = weight.data();
    for (int64_t edge = first; edge < last; ++edge) {
      for (int64_t head = 0; head < heads; ++head) {
        *to = std::exp(*to - most[head]);
        sum[head] += *to++;
      }
    }
    to = weight.data();
    // As in PyG's softmax.
    for (scalar_t& one : sum) one += static_cast<scalar_t>(1e-16);
    for (int64_t edge = first; edge < last; ++edge) {
      for (int64_t head = 0; head < heads; ++head) *to++ /= sum[head];
    }
  }

  const Edges& edges;
  Places<index_t> place;
  const scalar_t* source;
  const scalar_t* destination;
  int64_t heads;
  scalar_t slope;
  std::vector<scalar_t> weight, most, sum;
};

void attention(at::Tensor& out, const at::Tensor& source, const at::Tensor& destination,
               const at::Tensor& places, const std::optional<at::Tensor>& weight_places,
               const at::Tensor& starts, double slope, double dropout, int64_t seed) {
  const Given given(source, destination, places, weight_places, starts);
  const Dropout kept(dropout, seed);
  const int64_t heads = given.heads;
  check_dim("out", out, 2);
  const int64_t rows = weight_places ? out.size(0) : given.all.count;
  check_tensor("out", out, source.scalar_type(), {rows, heads});
  at::assert_no_overlap(out, source);
  at::assert_no_overlap(out, destination);
  AT_DISPATCH_FLOATING_TYPES(source.scalar_type(), "attention", [&] {
    AT_DISPATCH_INDEX_TYPES(given.all.kind, "attention", [&] {
      const Places<index_t> weight_place("weight_places", weight_places, rows);
      scalar_t* to = out.mutable_data_ptr<scalar_t>();
      for_each_part(given.edges.parts(), [&](int64_t part) {
        Row<scalar_t, index_t> own(given, slope);
        given.edges.for_each_row(part, [&](int64_t row) {
          own.find(row);
          const scalar_t* weight = own.weight.data();
          for (int64_t edge = given.edges.begin(row); edge < given.edges.begin(row + 1); ++edge) {
            const int64_t at = weight_place[edge] * heads;
            for (int64_t head = 0; head < heads; ++head) {
              to[at + head] = *weight++ * static_cast<scalar_t>(kept(at + head));
            }
          }
        });
      });
    });
  });
}

void attention_backward(at::Tensor& of_score, at::Tensor& of_destination,
                        const at::Tensor& gradient, const at::Tensor& source,
                        const at::Tensor& destination, const at::Tensor& places,
                        const std::optional<at::Tensor>& weight_places, const at::Tensor& starts,
                        double slope, double dropout, int64_t seed) {
  const Given given(source, destination, places, weight_places, starts);
  const Dropout kept(dropout, seed);
  const int64_t heads = given.heads;
  check_dim("gradient", gradient, 2);
  const int64_t rows = weight_places ? gradient.size(0) : given.all.count;
  check_tensor("gradient", gradient, source.scalar_type(), {rows, heads});
  check_tensor("of_score", of_score, source.scalar_type(), {rows, heads});
  check_tensor("of_destination", of_destination, source.scalar_type(), {given.edges.rows, heads});
  for (const at::Tensor& one : {gradient, source, destination}) {
    at::assert_no_overlap(of_score, one);
    at::assert_no_overlap(of_destination, one);
  }
  at::assert_no_overlap(of_score, of_destination);
  AT_DISPATCH_FLOATING_TYPES(source.scalar_type(), "attention_backward", [&] {
    AT_DISPATCH_INDEX_TYPES(given.all.kind, "attention_backward", [&] {
      const Places<index_t> weight_place("weight_places", weight_places, rows);
      const scalar_t* from = gradient.const_data_ptr<scalar_t>();
      scalar_t* to = of_score.mutable_data_ptr<scalar_t>();
      scalar_t* to_rows = of_destination.mutable_data_ptr<scalar_t>();
      for_each_part(given.edges.parts(), [&](int64_t part) {
        Row<scalar_t, index_t> own(given, slope);
        std::vector<scalar_t> mean(heads);
        given.edges.for_each_row(part, [&](int64_t row) {
          own.find(row);
          const int64_t first = given.edges.begin(row), last = given.edges.begin(row + 1);
          mean.assign(heads, 0);
          scalar_t* weight = own.weight.data();
          for (int64_t edge = first; edge < last; ++edge) {
            const int64_t at = weight_place[edge] * heads;
            for (int64_t head = 0; head < heads; ++head) {
              const scalar_t found = from[at + head] * static_cast<scalar_t>(kept(at + head));
              mean[head] += *weight++ * found;
              to[at + head] = found;
            }
          }
          scalar_t* sum = to_rows + row * heads;
          std::fill(sum, sum + heads, scalar_t(0));
          weight = own.weight.data();
          for (int64_t edge = first; edge < last; ++edge) {
            const int64_t at = weight_place[edge] * heads;
            for (int64_t head = 0; head < heads; ++head) {
              scalar_t found = *weight++ * (to[at + head] - mean[head]);
              if (!(own.score(row, edge, head) > 0)) found *= own.slope;
              to[at + head] = found;
              sum[head] += found;
            }
          }
        });
      });
    });
  });
}

void segment_sum(at::Tensor& out, const at::Tensor& x, const at::Tensor& places,
                 const at::Tensor& starts) {
  check_matrix("x", x);
  const int64_t width = x.size(1);
  const AllPlaces all(places, x.size(0));
  const Edges edges(starts, all.count);
  check_tensor("out", out, x.scalar_type(), {edges.rows, width});
  at::assert_no_overlap(out, x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "segment_sum", [&] {
    AT_DISPATCH_INDEX_TYPES(all.kind, "segment_sum", [&] {
      const Places<index_t> place("places", all.of_rows, x.size(0));
      const scalar_t* from = x.const_data_ptr<scalar_t>();
      const auto add = [&](scalar_t* sum, int64_t, int64_t first, int64_t last) {
        for (int64_t edge = first; edge < last; ++edge) {
          if (edge + kAhead < all.count) prefetch(from + place[edge + kAhead] * width, width);
          const scalar_t* own = from + place[edge] * width;
          for (int64_t i = 0; i < width; ++i) sum[i] += own[i];
        }
      };
      sum_rows(out.mutable_data_ptr<scalar_t>(), width, edges, add);
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def(
      "attention(Tensor(a!) out, Tensor source, Tensor destination, Tensor places,"
      " Tensor? weight_places, Tensor starts, float slope, float dropout, int seed) -> ()",
      &attention);
  library.def(
      "attention_backward(Tensor(a!) of_score, Tensor(b!) of_destination, Tensor gradient,"
      " Tensor source, Tensor destination, Tensor places, Tensor? weight_places, Tensor starts,"
      " float slope, float dropout, int seed) -> ()",
      &attention_backward);
  library.def("segment_sum(Tensor(a!) out, Tensor x, Tensor places, Tensor starts) -> ()",
              &segment_sum);
}

}  // namespace gact_graph
