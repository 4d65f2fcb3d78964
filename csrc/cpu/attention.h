// Attention on the CPU, whatever the scores of edges are: their softmax over the edges of a row,
// dropout, and the way back. The scores of edges live no longer than their row is worked on.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "../noise.h"
#include "edges.h"

namespace gact_graph {

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

// The rows at both ends of edges, and where the weights of edges lie.
struct Attended {
  Attended(const at::Tensor& source, const at::Tensor& destination, int64_t heads,
           const at::Tensor& places, const std::optional<at::Tensor>& weight_places,
           const at::Tensor& starts)
      : source(source),
        destination(destination),
        all(places, 0, weight_places),
        edges(starts, all.count),
        heads(heads),
        width(source.size(1)) {
    check_tensor("destination", destination, source.scalar_type(), {edges.rows, width});
  }

  // That a tensor has weights; returns of how many edges.
  int64_t check_weights(const char* name, const at::Tensor& x) const {
    check_dim(name, x, 2);
    const int64_t rows = all.of_weights ? x.size(0) : all.count;
    check_tensor(name, x, source.scalar_type(), {rows, heads});
    return rows;
  }

  const at::Tensor& source;
  const at::Tensor& destination;
  AllPlaces all;
  Edges edges;
  int64_t heads;
  int64_t width;
};

// The attention of the edges of one row, before dropout.
template <typename scalar_t, typename index_t>
struct Row {
  explicit Row(const Attended& given)
      : edges(given.edges),
        place("places", given.all.of_rows, given.source.size(0)),
        source(given.source.const_data_ptr<scalar_t>()),
        destination(given.destination.const_data_ptr<scalar_t>()),
        heads(given.heads),
        width(given.width),
        most(heads),
        sum(heads) {}

  const scalar_t* source_of(int64_t edge) const { return source + place[edge] * width; }
  const scalar_t* destination_of(int64_t row) const { return destination + row * width; }

  // Fills `weight` [edges, heads]; score.read(to, source, destination, edge) writes the scores of
  // an edge.
  template <typename Score>
  void find(int64_t row, const Score& score) {
    const int64_t first = edges.begin(row), last = edges.begin(row + 1);
    weight.resize((last - first) * heads);
    most.assign(heads, -std::numeric_limits<scalar_t>::infinity());
    sum.assign(heads, 0);
    scalar_t* to = weight.data();
    for (int64_t edge = first; edge < last; ++edge, to += heads) {
      if (edge + kAhead < edges.count()) prefetch(source_of(edge + kAhead), width);
      score.read(to, source_of(edge), destination_of(row), edge);
      for (int64_t head = 0; head < heads; ++head) most[head] = std::max(most[head], to[head]);
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
  int64_t width;
  std::vector<scalar_t> weight, most, sum;
};

// Writes the weights of all edges.
template <typename scalar_t, typename index_t, typename Score>
void attend(at::Tensor& out, const Attended& given, const Dropout& kept, const Score& score) {
  const int64_t heads = given.heads;
  const Places<index_t> weight_place("weight_places", given.all.of_weights, out.size(0));
  scalar_t* to = out.mutable_data_ptr<scalar_t>();
  for_each_part(given.edges.parts(), [&](int64_t part) {
    Row<scalar_t, index_t> own(given);
    given.edges.for_each_row(part, [&](int64_t row) {
      own.find(row, score);
      const scalar_t* weight = own.weight.data();
      for (int64_t edge = given.edges.begin(row); edge < given.edges.begin(row + 1); ++edge) {
        if (edge + kAhead < given.edges.count()) {
          __builtin_prefetch(to + weight_place[edge + kAhead] * heads, 1);
        }
        const int64_t at = weight_place[edge] * heads;
        for (int64_t head = 0; head < heads; ++head) {
          to[at + head] = *weight++ * static_cast<scalar_t>(kept(at + head));
        }
      }
    });
  });
}

// Writes what the scores make of their gradients: score_of(part) is the score in a part of the
// edges. Its go_back(of_score, source, destination, edge, of_destination) gets each edge, with the
// gradients of its scores, which it may change; end_row(of_destination) follows the edges of a row
// that has some.
template <typename scalar_t, typename index_t, typename ScoreOf>
void attend_backward(at::Tensor& of_score, at::Tensor& of_destination, const at::Tensor& gradient,
                     const Attended& given, const Dropout& kept, const ScoreOf& score_of) {
  const int64_t heads = given.heads, width = given.width;
  const Places<index_t> weight_place("weight_places", given.all.of_weights, gradient.size(0));
  const scalar_t* from = gradient.const_data_ptr<scalar_t>();
  scalar_t* to = of_score.mutable_data_ptr<scalar_t>();
  scalar_t* to_rows = of_destination.mutable_data_ptr<scalar_t>();
  for_each_part(given.edges.parts(), [&](int64_t part) {
    Row<scalar_t, index_t> own(given);
    auto score = score_of(part);
    std::vector<scalar_t> mean(heads), of_weight;
    given.edges.for_each_row(part, [&](int64_t row) {
      own.find(row, score);
      const int64_t first = given.edges.begin(row), last = given.edges.begin(row + 1);
      mean.assign(heads, 0);
      of_weight.resize(own.weight.size());
      const scalar_t* weight = own.weight.data();
      scalar_t* found = of_weight.data();
      for (int64_t edge = first; edge < last; ++edge) {
        if (edge + kAhead < given.edges.count()) {
          const int64_t ahead = weight_place[edge + kAhead] * heads;
          __builtin_prefetch(from + ahead);
          __builtin_prefetch(to + ahead, 1);
        }
        const int64_t at = weight_place[edge] * heads;
        for (int64_t head = 0; head < heads; ++head) {
          *found = from[at + head] * static_cast<scalar_t>(kept(at + head));
          mean[head] += *weight++ * *found++;
        }
      }
      scalar_t* sum = to_rows + row * width;
      std::fill(sum, sum + width, scalar_t(0));
      weight = own.weight.data();
      found = of_weight.data();
      for (int64_t edge = first; edge < last; ++edge) {
        const int64_t at = weight_place[edge] * heads;
        for (int64_t head = 0; head < heads; ++head) {
          to[at + head] = *weight++ * (*found++ - mean[head]);
        }
        score.go_back(to + at, own.source_of(edge), own.destination_of(row), edge, sum);
      }
      if (first < last) score.end_row(sum);
    });
  });
}

}  // namespace gact_graph
