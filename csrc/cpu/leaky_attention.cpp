// Attention weights from the rows of nodes on the CPU, and their gradients: see
// gact_graph/ops/leaky_attention.py. No row of an edge is materialized.

#include "attention.h"

namespace gact_graph {
namespace {

// The shape of the vector att, which weighs the columns of rows [N, heads * each].
struct AttShape {
  AttShape(const Tensor& att, const Tensor& source) {
    check_matrix("source", source);
    check_dim("att", att, 2);
    heads = att.size(0), each = att.size(1), width = source.size(1);
    check_tensor("att", att, source.scalar_type(), {heads, each});
    GACT_CHECK_VALUE(heads * each == width, "Expected att of ", width, " elements (got ",
                     heads * each, ")");
  }

  int64_t heads;
  int64_t each;
  int64_t width;
};

// The dot product of a vector and LeakyReLU of the sum of two others. Conditions choose among
// values at hand: a product on one side would be a branch, since it may raise a floating-point
// exception, and GCC would vectorize the loop with AVX-512 alone. A NaN is not above 0, and stays
// NaN.
template <typename scalar_t>
scalar_t leaky_dot(const scalar_t* vector, const scalar_t* a, const scalar_t* b, scalar_t slope,
                   int64_t count) {
  scalar_t product = 0;
#pragma omp simd reduction(+ : product)
  for (int64_t i = 0; i < count; ++i) {
    const scalar_t sum = a[i] + b[i];
    const scalar_t above = sum > 0 ? sum : scalar_t(0), below = sum > 0 ? scalar_t(0) : sum;
    product += (above + slope * below) * vector[i];
  }
  return product;
}

// The dot product, for each head, of att and LeakyReLU of the sum of the rows of source and
// destination.
template <typename scalar_t>
struct LeakyScore {
  LeakyScore(const AttShape& shape, const Tensor& att, double slope)
      : heads(shape.heads),
        each(shape.each),
        width(shape.width),
        att(const_data<scalar_t>(att)),
        slope(static_cast<scalar_t>(slope)) {}

  void forward(scalar_t* to, const scalar_t* source, const scalar_t* destination, int64_t) const {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = head * each;
      to[head] = leaky_dot(att + at, source + at, destination + at, slope, each);
    }
  }

  // Adds the gradient of the rows' sum, without the factor att, to `of_row`.
  void add_backward(scalar_t* of_row, const scalar_t* of_score, const scalar_t* source,
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

// The score with its gradient, which accumulates the gradient of att.
template <typename scalar_t>
struct LeakyScoreBackward : LeakyScore<scalar_t> {
  LeakyScoreBackward(const LeakyScore<scalar_t>& score, scalar_t* of_att)
      : LeakyScore<scalar_t>(score), of_att(of_att), of_row(score.width) {}

  void backward(scalar_t* of_score, const scalar_t* source, const scalar_t* destination, int64_t,
                scalar_t* of_destination) {
    for (int64_t head = 0; head < this->heads; ++head) {
      const int64_t at = head * this->each;
      const scalar_t above = of_score[head], below = above * this->slope;
      scalar_t* own = of_row.data();
#pragma omp simd
      for (int64_t i = at; i < at + this->each; ++i) {
        const scalar_t sum = source[i] + destination[i];
        const scalar_t of_sum = sum > 0 ? above : below;
        of_destination[i] += of_sum;
        own[i] += of_sum * sum;
      }
    }
  }

  // Summed row by row, so that rounding errors do not grow with the number of edges.
  void finish_row(scalar_t* of_destination) {
    this->times_att(of_destination);
    add_scaled(of_att, of_row.data(), scalar_t(1), this->width);
    std::fill(of_row.begin(), of_row.end(), scalar_t(0));
  }

  scalar_t* of_att;
  std::vector<scalar_t> of_row;
};

void leaky_attention(Tensor& out, const Tensor& source, const Tensor& destination,
                     const Tensor& att, const Tensor& places,
                     const std::optional<Tensor>& weight_places, const Tensor& starts, double slope,
                     double dropout, int64_t seed) {
  const AttShape shape(att, source);
  const AttentionInputs inputs(source, destination, shape.heads, places, weight_places, starts);
  const Dropout dropout_factor(dropout, seed);
  inputs.check_weights("out", out);
  check_no_overlap({&out}, {&source, &destination, &att});
  with_real(source.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(inputs.all.kind, [&](auto index) {
      using index_t = decltype(index);
      const LeakyScore<scalar_t> score(shape, att, slope);
      attend<scalar_t, index_t>(out, inputs, dropout_factor, score);
    });
  });
}

void leaky_attention_backward(Tensor& of_score, Tensor& of_destination, Tensor& of_att,
                              const Tensor& gradient, const Tensor& source,
                              const Tensor& destination, const Tensor& att, const Tensor& places,
                              const std::optional<Tensor>& weight_places, const Tensor& starts,
                              double slope, double dropout, int64_t seed) {
  const AttShape shape(att, source);
  const AttentionInputs inputs(source, destination, shape.heads, places, weight_places, starts);
  const Dropout dropout_factor(dropout, seed);
  const int64_t rows = inputs.check_weights("gradient", gradient), width = shape.width;
  const ScalarType kind = source.scalar_type();
  check_tensor("of_score", of_score, kind, {rows, shape.heads});
  check_tensor("of_destination", of_destination, kind, {inputs.edges.rows, width});
  check_tensor("of_att", of_att, kind, {shape.heads, shape.each});
  check_no_overlap({&of_score, &of_destination, &of_att}, {&gradient, &source, &destination, &att});
  with_real(kind, [&](auto real) {
    using scalar_t = decltype(real);
    with_index(inputs.all.kind, [&](auto index) {
      using index_t = decltype(index);
      const LeakyScore<scalar_t> score(shape, att, slope);
      const int64_t parts = inputs.edges.parts();
      std::vector<scalar_t> of_parts(parts * width);
      const auto score_of = [&](int64_t part) {
        return LeakyScoreBackward<scalar_t>(score, of_parts.data() + part * width);
      };
      attend_backward<scalar_t, index_t>(of_score, of_destination, gradient, inputs, dropout_factor,
                                         score_of);
      scalar_t* to = mutable_data<scalar_t>(of_att);
      std::fill(to, to + width, scalar_t(0));
      for (int64_t part = 0; part < parts; ++part) {
        add_scaled(to, of_parts.data() + part * width, scalar_t(1), width);
      }
    });
  });
}

void leaky_attention_source(Tensor& of_source, const Tensor& of_score, const Tensor& source,
                            const Tensor& destination, const Tensor& att, const Tensor& places,
                            const Tensor& weight_places, const Tensor& starts, double slope) {
  const AttShape shape(att, source);
  const int64_t heads = shape.heads, width = shape.width;
  const AllPlaces all(places, 0, weight_places);
  const Edges edges(starts, all.count);
  const ScalarType kind = source.scalar_type();
  check_dim("of_score", of_score, 2);
  check_tensor("of_score", of_score, kind, {of_score.size(0), heads});
  check_dim("destination", destination, 2);
  check_tensor("destination", destination, kind, {destination.size(0), width});
  check_tensor("source", source, kind, {edges.rows, width});
  check_tensor("of_source", of_source, kind, {edges.rows, width});
  check_no_overlap({&of_source}, {&of_score, &source, &destination, &att});
  with_real(kind, [&](auto real) {
    using scalar_t = decltype(real);
    with_index(all.kind, [&](auto index) {
      using index_t = decltype(index);
      const Places<index_t> place("places", all.of_rows, destination.size(0));
      const Places<index_t> score_place("weight_places", all.of_weights, of_score.size(0));
      const LeakyScore<scalar_t> score(shape, att, slope);
      const scalar_t* of_scores = const_data<scalar_t>(of_score);
      const scalar_t* rows = const_data<scalar_t>(source);
      const scalar_t* others = const_data<scalar_t>(destination);
      const auto add = [&](scalar_t* sum, int64_t row, int64_t first, int64_t last) {
        for (int64_t edge = first; edge < last; ++edge) {
          if (edge + kAhead < all.count) {
            prefetch(others + place[edge + kAhead] * width, width);
            __builtin_prefetch(of_scores + score_place[edge + kAhead] * heads);
          }
          const scalar_t* of_edge = of_scores + score_place[edge] * heads;
          score.add_backward(sum, of_edge, rows + row * width, others + place[edge] * width);
        }
        if (first < last) score.times_att(sum);
      };
      sum_rows(mutable_data<scalar_t>(of_source), width, edges, add);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("leaky_attention", TORCH_BOX(&leaky_attention));
  library.impl("leaky_attention_backward", TORCH_BOX(&leaky_attention_backward));
  library.impl("leaky_attention_source", TORCH_BOX(&leaky_attention_source));
}

}  // namespace gact_graph
