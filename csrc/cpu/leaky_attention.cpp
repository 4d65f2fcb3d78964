// Attention weights from the rows of nodes on the CPU, and their gradients: see
// gact_graph/ops/leaky_attention.py. No row of an edge is ever written.

#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "attention.h"

namespace gact_graph {
namespace {

// The heads of a vector that weighs the columns of rows [N, heads * each].
struct Vector {
  Vector(const at::Tensor& att, const at::Tensor& source) {
    check_matrix("source", source);
    check_dim("att", att, 2);
    heads = att.size(0), each = att.size(1), width = source.size(1);
    check_tensor("att", att, source.scalar_type(), {heads, each});
    TORCH_CHECK_VALUE(heads * each == width, "Expected att of ", width, " elements (got ",
                      heads * each, ")");
  }

  int64_t heads;
  int64_t each;
  int64_t width;
};

// The dot product of a vector and LeakyReLU of the sum of two others.
template <typename scalar_t>
scalar_t leaky_dot(const scalar_t* vector, const scalar_t* one, const scalar_t* other,
                   scalar_t slope, int64_t count) {
  scalar_t found = 0;
#pragma omp simd reduction(+ : found)
  for (int64_t i = 0; i < count; ++i) {
    const scalar_t sum = one[i] + other[i];
    const scalar_t low = sum * slope;
    found += (sum > 0 ? sum : low) * vector[i];
  }
  return found;
}

// The dot product, for each head, of a vector and LeakyReLU of the sum of the rows at both ends.
template <typename scalar_t>
struct LeakyScore {
  LeakyScore(const Vector& vector, const at::Tensor& att, double slope)
      : heads(vector.heads),
        each(vector.each),
        width(vector.width),
        att(att.const_data_ptr<scalar_t>()),
        slope(static_cast<scalar_t>(slope)) {}

  void read(scalar_t* to, const scalar_t* source, const scalar_t* destination, int64_t) const {
    for (int64_t head = 0; head < heads; ++head) {
      const scalar_t* one = source + head * each;
      const scalar_t* other = destination + head * each;
      to[head] = leaky_dot(att + head * each, one, other, slope, each);
    }
  }

  // Adds to `of_row` the gradient of the rows' sum, but for the factor att.
  void add_back(scalar_t* of_row, const scalar_t* of_score, const scalar_t* source,
                const scalar_t* destination) const {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = head * each;
      const scalar_t above = of_score[head], below = above * slope;
#pragma omp simd
      for (int64_t i = at; i < at + each; ++i) {
        of_row[i] += source[i] + destination[i] > 0 ? above : below;
      }
    }
  }

  void times_att(scalar_t* of_row) const {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) of_row[i] *= att[i];
  }

  int64_t heads;
  int64_t each;
  int64_t width;
  const scalar_t* att;
  scalar_t slope;
};

// The same, which adds up the gradient of att.
template <typename scalar_t>
struct LeakyScoreBackward : LeakyScore<scalar_t> {
  LeakyScoreBackward(const LeakyScore<scalar_t>& score, scalar_t* of_att)
      : LeakyScore<scalar_t>(score), of_att(of_att), of_row(score.width) {}

  void go_back(scalar_t* of_score, const scalar_t* source, const scalar_t* destination, int64_t,
               scalar_t* of_destination) {
    for (int64_t head = 0; head < this->heads; ++head) {
      const int64_t at = head * this->each;
      const scalar_t above = of_score[head], below = above * this->slope;
      scalar_t* own = of_row.data();
#pragma omp simd
      for (int64_t i = at; i < at + this->each; ++i) {
        const scalar_t sum = source[i] + destination[i];
        const scalar_t found = sum > 0 ? above : below;
        of_destination[i] += found;
        own[i] += found * sum;
      }
    }
  }

  // The sums of a row first, so that errors do not grow with the number of edges.
  void end_row(scalar_t* of_destination) {
    this->times_att(of_destination);
    add_scaled(of_att, of_row.data(), scalar_t(1), this->width);
    std::fill(of_row.begin(), of_row.end(), scalar_t(0));
  }

  scalar_t* of_att;
  std::vector<scalar_t> of_row;
};

void leaky_attention(at::Tensor& out, const at::Tensor& source, const at::Tensor& destination,
                     const at::Tensor& att, const at::Tensor& places,
                     const std::optional<at::Tensor>& weight_places, const at::Tensor& starts,
                     double slope, double dropout, int64_t seed) {
  const Vector vector(att, source);
  const Attended given(source, destination, vector.heads, places, weight_places, starts);
  const Dropout kept(dropout, seed);
  given.check_weights("out", out);
  for (const at::Tensor& one : {source, destination, att}) at::assert_no_overlap(out, one);
  AT_DISPATCH_FLOATING_TYPES(source.scalar_type(), "leaky_attention", [&] {
    AT_DISPATCH_INDEX_TYPES(given.all.kind, "leaky_attention", [&] {
      const LeakyScore<scalar_t> score(vector, att, slope);
      attend<scalar_t, index_t>(out, given, kept, score);
    });
  });
}

void leaky_attention_backward(at::Tensor& of_score, at::Tensor& of_destination, at::Tensor& of_att,
                              const at::Tensor& gradient, const at::Tensor& source,
                              const at::Tensor& destination, const at::Tensor& att,
                              const at::Tensor& places,
                              const std::optional<at::Tensor>& weight_places,
                              const at::Tensor& starts, double slope, double dropout,
                              int64_t seed) {
  const Vector vector(att, source);
  const Attended given(source, destination, vector.heads, places, weight_places, starts);
  const Dropout kept(dropout, seed);
  const int64_t rows = given.check_weights("gradient", gradient), width = vector.width;
  const at::ScalarType kind = source.scalar_type();
  check_tensor("of_score", of_score, kind, {rows, vector.heads});
  check_tensor("of_destination", of_destination, kind, {given.edges.rows, width});
  check_tensor("of_att", of_att, kind, {vector.heads, vector.each});
  for (const at::Tensor& one : {gradient, source, destination, att}) {
    for (const at::Tensor& to : {of_score, of_destination, of_att}) at::assert_no_overlap(to, one);
  }
  at::assert_no_overlap(of_score, of_destination);
  at::assert_no_overlap(of_score, of_att);
  at::assert_no_overlap(of_destination, of_att);
  AT_DISPATCH_FLOATING_TYPES(kind, "leaky_attention_backward", [&] {
    AT_DISPATCH_INDEX_TYPES(given.all.kind, "leaky_attention_backward", [&] {
      const LeakyScore<scalar_t> score(vector, att, slope);
      const int64_t parts = given.edges.parts();
      std::vector<scalar_t> of_parts(parts * width);
      const auto score_of = [&](int64_t part) {
        return LeakyScoreBackward<scalar_t>(score, of_parts.data() + part * width);
      };
      attend_backward<scalar_t, index_t>(of_score, of_destination, gradient, given, kept, score_of);
      scalar_t* to = of_att.mutable_data_ptr<scalar_t>();
      std::fill(to, to + width, scalar_t(0));
      for (int64_t part = 0; part < parts; ++part) {
        add_scaled(to, of_parts.data() + part * width, scalar_t(1), width);
      }
    });
  });
}

void leaky_attention_source(at::Tensor& of_source, const at::Tensor& of_score,
                            const at::Tensor& source, const at::Tensor& destination,
                            const at::Tensor& att, const at::Tensor& places,
                            const at::Tensor& weight_places, const at::Tensor& starts,
                            double slope) {
  const Vector vector(att, source);
  const int64_t heads = vector.heads, width = vector.width;
  const AllPlaces all(places, 0, weight_places);
  const Edges edges(starts, all.count);
  const at::ScalarType kind = source.scalar_type();
  check_dim("of_score", of_score, 2);
  check_tensor("of_score", of_score, kind, {of_score.size(0), heads});
  check_dim("destination", destination, 2);
  check_tensor("destination", destination, kind, {destination.size(0), width});
  check_tensor("source", source, kind, {edges.rows, width});
  check_tensor("of_source", of_source, kind, {edges.rows, width});
  for (const at::Tensor& one : {of_score, source, destination, att}) {
    at::assert_no_overlap(of_source, one);
  }
  AT_DISPATCH_FLOATING_TYPES(kind, "leaky_attention_source", [&] {
    AT_DISPATCH_INDEX_TYPES(all.kind, "leaky_attention_source", [&] {
      const Places<index_t> place("places", all.of_rows, destination.size(0));
      const Places<index_t> score_place("weight_places", all.of_weights, of_score.size(0));
      const LeakyScore<scalar_t> score(vector, att, slope);
      const scalar_t* of_scores = of_score.const_data_ptr<scalar_t>();
      const scalar_t* rows = source.const_data_ptr<scalar_t>();
      const scalar_t* others = destination.const_data_ptr<scalar_t>();
      const auto add = [&](scalar_t* sum, int64_t row, int64_t first, int64_t last) {
        for (int64_t edge = first; edge < last; ++edge) {
          if (edge + kAhead < all.count) {
            prefetch(others + place[edge + kAhead] * width, width);
            __builtin_prefetch(of_scores + score_place[edge + kAhead] * heads);
          }
          const scalar_t* given = of_scores + score_place[edge] * heads;
          score.add_back(sum, given, rows + row * width, others + place[edge] * width);
        }
        if (first < last) score.times_att(sum);
      };
      sum_rows(of_source.mutable_data_ptr<scalar_t>(), width, edges, add);
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def(
      "leaky_attention(Tensor(a!) out, Tensor source, Tensor destination, Tensor att,"
      " Tensor places, Tensor? weight_places, Tensor starts, float slope, float dropout, int seed)"
      " -> ()",
      &leaky_attention);
  library.def(
      "leaky_attention_backward(Tensor(a!) of_score, Tensor(b!) of_destination, Tensor(c!) of_att,"
      " Tensor gradient, Tensor source, Tensor destination, Tensor att, Tensor places,"
      " Tensor? weight_places, Tensor starts, float slope, float dropout, int seed) -> ()",
      &leaky_attention_backward);
  library.def(
      "leaky_attention_source(Tensor(a!) of_source, Tensor of_score, Tensor source,"
      " Tensor destination, Tensor att, Tensor places, Tensor weight_places, Tensor starts,"
      " float slope) -> ()",
      &leaky_attention_source);
}

}  // namespace gact_graph
