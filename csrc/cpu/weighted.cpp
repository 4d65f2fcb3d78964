// Sums of weighted rows on the CPU, and their gradients: see gact_graph/ops/weighted_sum.py.
// No message is materialized.

#include <optional>

#include "edges.h"

namespace gact_graph {
namespace {

// Adds a scaled row and returns its dot product with another row, in one pass.
template <typename scalar_t>
scalar_t add_scaled_and_dot(scalar_t* to, const scalar_t* from, scalar_t by, const scalar_t* other,
                            int64_t count) {
  scalar_t product = 0;
#pragma omp simd reduction(+ : product)
  for (int64_t i = 0; i < count; ++i) {
    to[i] += by * from[i];
    product += from[i] * other[i];
  }
  return product;
}

// Checks the weights and returns their number of heads.
int64_t check_weight(const Tensor& weight, const AllPlaces& places, ScalarType dtype) {
  check_dim("weight", weight, 2);
  const int64_t rows = places.of_weights ? weight.size(0) : places.count;
  check_tensor("weight", weight, dtype, {rows, weight.size(1)});
  return weight.size(1);
}

void weighted_sum(Tensor& out, const Tensor& x, const std::optional<Tensor>& places,
                  const Tensor& weight, const std::optional<Tensor>& weight_places,
                  const Tensor& starts) {
  check_matrix("x", x);
  const AllPlaces all(places, x.size(0), weight_places);
  const Heads shared(x, check_weight(weight, all, x.scalar_type()));
  const int64_t heads = shared.heads, width = shared.width, each = shared.each;
  const Edges edges(starts, all.count);
  check_tensor("out", out, x.scalar_type(), {edges.rows, width});
  check_no_overlap({&out}, {&x, &weight});
  with_real(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(all.kind, [&](auto index) {
      using index_t = decltype(index);
      const Places<index_t> place("places", places, x.size(0));
      const Places<index_t> weight_place("weight_places", weight_places, weight.size(0));
      const scalar_t* from = const_data<scalar_t>(x);
      const scalar_t* w = const_data<scalar_t>(weight);
      const auto add = [&](scalar_t* sum, int64_t, int64_t first, int64_t last) {
        for (int64_t edge = first; edge < last; ++edge) {
          if (edge + kAhead < all.count) {
            prefetch(from + place[edge + kAhead] * width, width);
            __builtin_prefetch(w + weight_place[edge + kAhead] * heads);
          }
          const scalar_t* own = from + place[edge] * width;
          const scalar_t* own_w = w + weight_place[edge] * heads;
          for (int64_t head = 0; head < heads; ++head) {
            add_scaled(sum + head * each, own + head * each, own_w[head], each);
          }
        }
      };
      sum_rows(mutable_data<scalar_t>(out), width, edges, add);
    });
  });
}

Tensor weighted_sum_weights(const Tensor& gradient, const Tensor& x,
                            const std::optional<Tensor>& places, const Tensor& starts,
                            int64_t heads) {
  check_matrix("x", x);
  const Heads shared(x, heads);
  const int64_t width = shared.width, each = shared.each;
  const AllPlaces all(places, x.size(0));
  const Edges edges(starts, all.count);
  check_tensor("gradient", gradient, x.scalar_type(), {edges.rows, width});
  Tensor of_weight = empty({all.count, heads}, x.scalar_type());
  with_real(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(all.kind, [&](auto index) {
      using index_t = decltype(index);
      const Places<index_t> place("places", places, x.size(0));
      const scalar_t* of_sum = const_data<scalar_t>(gradient);
      const scalar_t* from = const_data<scalar_t>(x);
      scalar_t* to = mutable_data<scalar_t>(of_weight);
      for_each_part(edges.parts(), [&](int64_t part) {
        const int64_t last = edges.part_begin(part + 1);
        int64_t edge = edges.part_begin(part);
        for (int64_t row = edges.row_of(edge); edge < last; ++row) {
          const scalar_t* sum = of_sum + row * width;
          for (const int64_t end = std::min(last, edges.begin(row + 1)); edge < end; ++edge) {
            if (edge + kAhead < all.count) prefetch(from + place[edge + kAhead] * width, width);
            const scalar_t* own = from + place[edge] * width;
            for (int64_t head = 0; head < heads; ++head) {
              to[edge * heads + head] = dot(sum + head * each, own + head * each, each);
            }
          }
        }
      });
    });
  });
  return of_weight;
}

void weighted_sum_backward(Tensor& of_x, Tensor& of_weight, const Tensor& gradient, const Tensor& x,
                           const Tensor& places, const Tensor& weight, const Tensor& weight_places,
                           const Tensor& starts) {
  check_matrix("x", x);
  const std::optional<Tensor> rows(places), weights(weight_places);
  const AllPlaces all(rows, gradient.size(0), weights);
  const Heads shared(x, check_weight(weight, all, x.scalar_type()));
  const int64_t heads = shared.heads, width = shared.width, each = shared.each;
  const Edges edges(starts, all.count);
  check_matrix("gradient", gradient);
  check_tensor("gradient", gradient, x.scalar_type(), {gradient.size(0), width});
  check_tensor("x", x, x.scalar_type(), {edges.rows, width});
  check_tensor("of_x", of_x, x.scalar_type(), {edges.rows, width});
  check_tensor("of_weight", of_weight, x.scalar_type(), {weight.size(0), heads});
  check_no_overlap({&of_x, &of_weight}, {&gradient, &x, &weight});
  with_real(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    with_index(all.kind, [&](auto index) {
      using index_t = decltype(index);
      const Places<index_t> place("places", rows, gradient.size(0));
      const Places<index_t> weight_place("weight_places", weights, weight.size(0));
      const scalar_t* of_sum = const_data<scalar_t>(gradient);
      const scalar_t* from = const_data<scalar_t>(x);
      const scalar_t* w = const_data<scalar_t>(weight);
      scalar_t* to = mutable_data<scalar_t>(of_weight);
      const auto add = [&](scalar_t* sum, int64_t row, int64_t first, int64_t last) {
        const scalar_t* own = from + row * width;
        for (int64_t edge = first; edge < last; ++edge) {
          if (edge + kAhead < all.count) {
            prefetch(of_sum + place[edge + kAhead] * width, width);
            __builtin_prefetch(w + weight_place[edge + kAhead] * heads);
            __builtin_prefetch(to + weight_place[edge + kAhead] * heads, 1);
          }
          const scalar_t* other = of_sum + place[edge] * width;
          const int64_t at = weight_place[edge] * heads;
          for (int64_t head = 0; head < heads; ++head) {
            to[at + head] = add_scaled_and_dot(sum + head * each, other + head * each, w[at + head],
                                               own + head * each, each);
          }
        }
      };
      sum_rows(mutable_data<scalar_t>(of_x), width, edges, add);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("weighted_sum", TORCH_BOX(&weighted_sum));
  library.impl("weighted_sum_weights", TORCH_BOX(&weighted_sum_weights));
  library.impl("weighted_sum_backward", TORCH_BOX(&weighted_sum_backward));
}

}  // namespace gact_graph
