// Attention on the CPU for any score of edges: the softmax over the edges of a row, dropout, and
// their gradients. The scores of edges live only while their row is processed.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "../noise.h"
#include "edges.h"

namespace gact_graph {

// The factor of dropout: a pure function of the seed and the index of a weight.
struct Dropout {
  Dropout(double probability, int64_t seed) : seed(static_cast<uint64_t>(seed)) {
    GACT_CHECK_VALUE(0 <= probability && probability < 1,
                     "Expected dropout from 0 to less than 1 (got ", probability, ")");
    // In steps of 2^-16. The scale is the reciprocal of the rounded probability of keeping a
    // weight, so the expectation is 1.
    dropped = static_cast<uint32_t>(std::min(std::lrint(probability * 65536), 65535L));
    scale = 65536.0 / (65536 - dropped);
  }

  double operator()(int64_t i) const {
    if (dropped == 0) return 1;
    const auto index = static_cast<uint64_t>(i);
    const uint32_t noise = noise16(static_cast<uint32_t>(index), noise_key(seed, index));
    return noise < dropped ? 0 : scale;
  }

  uint64_t seed;
  uint32_t dropped;
  double scale;
};

// The rows of sources and destinations, the edges, and the places of their weights.
struct AttentionInputs {
  AttentionInputs(const Tensor& source, const Tensor& destination, int64_t heads,
                  const Tensor& places, const std::optional<Tensor>& weight_places,
                  const Tensor& starts)
      : source(source),
        destination(destination),
        all(places, 0, weight_places),
        edges(starts, all.count),
        heads(heads),
        width(source.size(1)) {
    check_tensor("destination", destination, source.scalar_type(), {edges.rows, width});
  }

  // Checks a tensor of weights; returns its number of rows.
  int64_t check_weights(const char* name, const Tensor& x) const {
    check_dim(name, x, 2);
    const int64_t rows = all.of_weights ? x.size(0) : all.count;
    check_tensor(name, x, source.scalar_type(), {rows, heads});
    return rows;
  }

  const Tensor& source;
  const Tensor& destination;
  AllPlaces all;
  Edges edges;
  int64_t heads;
  int64_t width;
};

// The attention weights of a row's edges, before dropout.
template <typename scalar_t, typename index_t>
struct RowSoftmax {
  explicit RowSoftmax(const AttentionInputs& inputs)
      : edges(inputs.edges),
        place("places", inputs.all.of_rows, inputs.source.size(0)),
        source(const_data<scalar_t>(inputs.source)),
        destination(const_data<scalar_t>(inputs.destination)),
        heads(inputs.heads),
        width(inputs.width),
        most(heads),
        sum(heads) {}

  const scalar_t* source_of(int64_t edge) const { return source + place[edge] * width; }
  const scalar_t* destination_of(int64_t row) const { return destination + row * width; }

  // Computes `weight` [edges, heads]; score.forward(to, source, destination, edge) writes the
  // scores of an edge.
  template <typename Score>
  void compute(int64_t row, const Score& score) {
    const int64_t first = edges.begin(row), last = edges.begin(row + 1);
    weight.resize((last - first) * heads);
    most.assign(heads, -std::numeric_limits<scalar_t>::infinity());
    sum.assign(heads, 0);
    scalar_t* to = weight.data();
    for (int64_t edge = first; edge < last; ++edge, to += heads) {
      if (edge + kAhead < edges.count()) prefetch(source_of(edge + kAhead), width);
      score.forward(to, source_of(edge), destination_of(row), edge);
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
    for (scalar_t& total : sum) total += static_cast<scalar_t>(1e-16);
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
void attend(Tensor& out, const AttentionInputs& inputs, const Dropout& dropout_factor,
            const Score& score) {
  const int64_t heads = inputs.heads;
  const Places<index_t> weight_place("weight_places", inputs.all.of_weights, out.size(0));
  scalar_t* to = mutable_data<scalar_t>(out);
  for_each_part(inputs.edges.parts(), [&](int64_t part) {
    RowSoftmax<scalar_t, index_t> softmax(inputs);
    inputs.edges.for_each_row(part, [&](int64_t row) {
      softmax.compute(row, score);
      const scalar_t* weight = softmax.weight.data();
      for (int64_t edge = inputs.edges.begin(row); edge < inputs.edges.begin(row + 1); ++edge) {
        if (edge + kAhead < inputs.edges.count()) {
          __builtin_prefetch(to + weight_place[edge + kAhead] * heads, 1);
        }
        const int64_t at = weight_place[edge] * heads;
        for (int64_t head = 0; head < heads; ++head) {
          to[at + head] = *weight++ * static_cast<scalar_t>(dropout_factor(at + head));
        }
      }
    });
  });
}

// Writes the gradients of the scores and of the destinations. score_of(part) is the score for a
// part of the edges: its backward(of_score, source, destination, edge, of_destination) is called
// for each edge with the gradients of its scores, which it may change, and
// finish_row(of_destination) after the last edge of each row.
template <typename scalar_t, typename index_t, typename ScoreOf>
void attend_backward(Tensor& of_score, Tensor& of_destination, const Tensor& gradient,
                     const AttentionInputs& inputs, const Dropout& dropout_factor,
                     const ScoreOf& score_of) {
  const int64_t heads = inputs.heads, width = inputs.width;
  const Places<index_t> weight_place("weight_places", inputs.all.of_weights, gradient.size(0));
  const scalar_t* from = const_data<scalar_t>(gradient);
  scalar_t* to = mutable_data<scalar_t>(of_score);
  scalar_t* to_rows = mutable_data<scalar_t>(of_destination);
  for_each_part(inputs.edges.parts(), [&](int64_t part) {
    RowSoftmax<scalar_t, index_t> softmax(inputs);
    auto score = score_of(part);
    std::vector<scalar_t> mean(heads), of_weight;
    inputs.edges.for_each_row(part, [&](int64_t row) {
      softmax.compute(row, score);
      const int64_t first = inputs.edges.begin(row), last = inputs.edges.begin(row + 1);
      mean.assign(heads, 0);
      of_weight.resize(softmax.weight.size());
      const scalar_t* weight = softmax.weight.data();
      scalar_t* own = of_weight.data();
      for (int64_t edge = first; edge < last; ++edge) {
        if (edge + kAhead < inputs.edges.count()) {
          const int64_t ahead = weight_place[edge + kAhead] * heads;
          __builtin_prefetch(from + ahead);
          __builtin_prefetch(to + ahead, 1);
        }
        const int64_t at = weight_place[edge] * heads;
        for (int64_t head = 0; head < heads; ++head) {
          *own = from[at + head] * static_cast<scalar_t>(dropout_factor(at + head));
          mean[head] += *weight++ * *own++;
        }
      }
      scalar_t* sum = to_rows + row * width;
      std::fill(sum, sum + width, scalar_t(0));
      weight = softmax.weight.data();
      own = of_weight.data();
      for (int64_t edge = first; edge < last; ++edge) {
        const int64_t at = weight_place[edge] * heads;
        for (int64_t head = 0; head < heads; ++head) {
          to[at + head] = *weight++ * (*own++ - mean[head]);
        }
        score.backward(to + at, softmax.source_of(edge), softmax.destination_of(row), edge, sum);
      }
      if (first < last) score.finish_row(sum);
    });
  });
}

}  // namespace gact_graph
