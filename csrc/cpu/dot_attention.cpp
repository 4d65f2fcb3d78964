// Attention weights from dot products of the rows of nodes on the CPU, and the gradients of these
// products: see gact_graph/ops/dot_attention.py.

#include "attention.h"

namespace gact_graph {
namespace {

// The scaled dot product, for each head, of the rows of source and destination, plus the edge's
// term.
template <typename scalar_t>
struct DotScore {
  void forward(scalar_t* to, const scalar_t* source, const scalar_t* destination,
               int64_t edge) const {
    for (int64_t head = 0; head < heads; ++head) {
      scalar_t product = dot(source + head * each, destination + head * each, each);
      if (terms != nullptr) product += terms[edge * heads + head];
      to[head] = product * scale;
    }
  }

  int64_t heads;
  int64_t each;
  scalar_t scale;
  const scalar_t* terms;
};

void dot_attention(Tensor& out, const Tensor& source, const Tensor& destination,
                   const std::optional<Tensor>& terms, const Tensor& places,
                   const std::optional<Tensor>& weight_places, const Tensor& starts, double scale) {
  check_matrix("source", source);
  check_dim("out", out, 2);
  const Heads shared(source, out.size(1));
  const AttentionInputs inputs(source, destination, shared.heads, places, weight_places, starts);
  inputs.check_weights("out", out);
  if (terms) check_tensor("terms", *terms, source.scalar_type(), {inputs.all.count, shared.heads});
  check_no_overlap({&out}, {&source, &destination, pointer_to(terms)});
  with_real(source.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(inputs.all.kind, [&](auto index) {
      using index_t = decltype(index);
      const scalar_t* added = terms ? const_data<scalar_t>(*terms) : nullptr;
      const auto factor = static_cast<scalar_t>(scale);
      const DotScore<scalar_t> score{shared.heads, shared.each, factor, added};
      attend<scalar_t, index_t>(out, inputs, Dropout(0, 0), score);
    });
  });
}

void dot_attention_backward(Tensor& gradient, const Tensor& weight,
                            const std::optional<Tensor>& places, const Tensor& starts,
                            double scale) {
  check_matrix("gradient", gradient);
  const int64_t rows = gradient.size(0), heads = gradient.size(1);
  check_tensor("weight", weight, gradient.scalar_type(), {rows, heads});
  const AllPlaces all(places, rows);
  const Edges edges(starts, all.count);
  check_no_overlap({&gradient}, {&weight});
  with_real(gradient.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(all.kind, [&](auto index) {
      using index_t = decltype(index);
      const Places<index_t> place("places", all.of_rows, rows);
      const scalar_t* weights = const_data<scalar_t>(weight);
      scalar_t* to = mutable_data<scalar_t>(gradient);
      for_each_part(edges.parts(), [&](int64_t part) {
        std::vector<scalar_t> mean(heads);
        edges.for_each_row(part, [&](int64_t row) {
          const int64_t first = edges.begin(row), last = edges.begin(row + 1);
          mean.assign(heads, 0);
          for (int64_t edge = first; edge < last; ++edge) {
            const int64_t at = place[edge] * heads;
            for (int64_t head = 0; head < heads; ++head) {
              mean[head] += weights[at + head] * to[at + head];
            }
          }
          for (int64_t edge = first; edge < last; ++edge) {
            const int64_t at = place[edge] * heads;
            for (int64_t head = 0; head < heads; ++head) {
              const scalar_t of_score = weights[at + head] * (to[at + head] - mean[head]);
              to[at + head] = of_score * static_cast<scalar_t>(scale);
            }
          }
        });
      });
    });
  });
}

void drop_weights(Tensor& weight, double dropout, int64_t seed) {
  check_matrix("weight", weight);
  check_tensor("weight", weight, weight.scalar_type(), {weight.size(0), weight.size(1)});
  const Dropout dropout_factor(dropout, seed);
  with_real(weight.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    scalar_t* to = mutable_data<scalar_t>(weight);
    for_each_range(weight.numel(), kGrain, [&](int64_t from, int64_t end) {
      for (int64_t i = from; i < end; ++i) to[i] *= static_cast<scalar_t>(dropout_factor(i));
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("dot_attention", TORCH_BOX(&dot_attention));
  library.impl("dot_attention_backward", TORCH_BOX(&dot_attention_backward));
  library.impl("drop_weights", TORCH_BOX(&drop_weights));
}

}  // namespace gact_graph
