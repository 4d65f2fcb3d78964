// Attention weights from the scores of nodes on the CPU, and their gradients: see
// gact_graph/ops/attention.py.

#include "attention.h"

namespace gact_graph {
namespace {

// LeakyReLU of the sum of the scores of source, destination and, if there are terms, edge.
template <typename scalar_t, typename index_t>
struct SumScore {
  SumScore(const AttentionInputs& inputs, const std::optional<Tensor>& terms, int64_t rows,
           double slope)
      : heads(inputs.heads),
        count(inputs.all.count),
        slope(static_cast<scalar_t>(slope)),
        place("weight_places", inputs.all.of_weights, rows),
        terms(terms ? const_data<scalar_t>(*terms) : nullptr) {}

  void forward(scalar_t* to, const scalar_t* source, const scalar_t* destination,
               int64_t edge) const {
    if (terms != nullptr && edge + kAhead < count) prefetch(term_of(edge + kAhead), heads);
    const scalar_t* term = term_of(edge);
    for (int64_t head = 0; head < heads; ++head) {
      const scalar_t x = sum(source, destination, term, head);
      to[head] = x > 0 ? x : x * slope;
    }
  }

  // Replaces the gradient of the score by that of the sum.
  void backward(scalar_t* of_score, const scalar_t* source, const scalar_t* destination,
                int64_t edge, scalar_t* of_destination) const {
    const scalar_t* term = term_of(edge);
    for (int64_t head = 0; head < heads; ++head) {
      if (!(sum(source, destination, term, head) > 0)) of_score[head] *= slope;
      of_destination[head] += of_score[head];
    }
  }

  void finish_row(scalar_t*) const {}

  const scalar_t* term_of(int64_t edge) const {
    return terms == nullptr ? nullptr : terms + place[edge] * heads;
  }

  static scalar_t sum(const scalar_t* source, const scalar_t* destination, const scalar_t* term,
                      int64_t head) {
    const scalar_t ends = source[head] + destination[head];
    return term == nullptr ? ends : ends + term[head];
  }

  int64_t heads;
  int64_t count;
  scalar_t slope;
  Places<index_t> place;
  const scalar_t* terms;
};

// Checks the terms of edges; `rows` is the number of rows of the weights.
void check_terms(const std::optional<Tensor>& terms, const AttentionInputs& inputs, int64_t rows) {
  if (terms) check_tensor("terms", *terms, inputs.source.scalar_type(), {rows, inputs.heads});
}

void attention(Tensor& out, const Tensor& source, const Tensor& destination,
               const std::optional<Tensor>& terms, const Tensor& places,
               const std::optional<Tensor>& weight_places, const Tensor& starts, double slope,
               double dropout, int64_t seed) {
  check_matrix("source", source);
  const AttentionInputs inputs(source, destination, source.size(1), places, weight_places, starts);
  const Dropout dropout_factor(dropout, seed);
  const int64_t rows = inputs.check_weights("out", out);
  check_terms(terms, inputs, rows);
  check_no_overlap({&out}, {&source, &destination, pointer_to(terms)});
  with_real(source.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(inputs.all.kind, [&](auto index) {
      using index_t = decltype(index);
      const SumScore<scalar_t, index_t> score(inputs, terms, rows, slope);
      attend<scalar_t, index_t>(out, inputs, dropout_factor, score);
    });
  });
}

void attention_backward(Tensor& of_score, Tensor& of_destination, const Tensor& gradient,
                        const Tensor& source, const Tensor& destination,
                        const std::optional<Tensor>& terms, const Tensor& places,
                        const std::optional<Tensor>& weight_places, const Tensor& starts,
                        double slope, double dropout, int64_t seed) {
  check_matrix("source", source);
  const int64_t heads = source.size(1);
  const AttentionInputs inputs(source, destination, heads, places, weight_places, starts);
  const Dropout dropout_factor(dropout, seed);
  const int64_t rows = inputs.check_weights("gradient", gradient);
  check_terms(terms, inputs, rows);
  check_tensor("of_score", of_score, source.scalar_type(), {rows, heads});
  check_tensor("of_destination", of_destination, source.scalar_type(), {inputs.edges.rows, heads});
  check_no_overlap({&of_score, &of_destination},
                   {&gradient, &source, &destination, pointer_to(terms)});
  with_real(source.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(inputs.all.kind, [&](auto index) {
      using index_t = decltype(index);
      const SumScore<scalar_t, index_t> score(inputs, terms, rows, slope);
      const auto score_of = [&](int64_t) { return score; };
      attend_backward<scalar_t, index_t>(of_score, of_destination, gradient, inputs, dropout_factor,
                                         score_of);
    });
  });
}

void segment_sum(Tensor& out, const Tensor& x, const Tensor& places, const Tensor& starts) {
  check_matrix("x", x);
  const int64_t width = x.size(1);
  const AllPlaces all(places, x.size(0));
  const Edges edges(starts, all.count);
  check_tensor("out", out, x.scalar_type(), {edges.rows, width});
  check_no_overlap({&out}, {&x});
  with_real(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(all.kind, [&](auto index) {
      using index_t = decltype(index);
      const Places<index_t> place("places", all.of_rows, x.size(0));
      const scalar_t* from = const_data<scalar_t>(x);
      const auto add = [&](scalar_t* sum, int64_t, int64_t first, int64_t last) {
        for (int64_t edge = first; edge < last; ++edge) {
          if (edge + kAhead < all.count) prefetch(from + place[edge + kAhead] * width, width);
          const scalar_t* row = from + place[edge] * width;
          for (int64_t i = 0; i < width; ++i) sum[i] += row[i];
        }
      };
      sum_rows(mutable_data<scalar_t>(out), width, edges, add);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("attention", TORCH_BOX(&attention));
  library.impl("attention_backward", TORCH_BOX(&attention_backward));
  library.impl("segment_sum", TORCH_BOX(&segment_sum));
}

}  // namespace gact_graph
