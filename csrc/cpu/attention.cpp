// Attention weights from the scores of nodes on the CPU, and their gradients: see
// gact_graph/ops/attention.py.

#include "attention.h"

#include <ATen/Dispatch.h>
#include <torch/library.h>

namespace gact_graph {
namespace {

// LeakyReLU of the sum of what the nodes at both ends have and, if there are terms, of what the
// edge adds.
template <typename scalar_t, typename index_t>
struct SumScore {
  SumScore(const Attended& given, const std::optional<at::Tensor>& terms, int64_t rows,
           double slope)
      : heads(given.heads),
        count(given.all.count),
        slope(static_cast<scalar_t>(slope)),
        place("weight_places", given.all.of_weights, rows),
        terms(terms ? terms->const_data_ptr<scalar_t>() : nullptr) {}

  void read(scalar_t* to, const scalar_t* source, const scalar_t* destination, int64_t edge) const {
    if (terms != nullptr && edge + kAhead < count) prefetch(term_of(edge + kAhead), heads);
    const scalar_t* term = term_of(edge);
    for (int64_t head = 0; head < heads; ++head) {
      const scalar_t found = sum(source, destination, term, head);
      to[head] = found > 0 ? found : found * slope;
    }
  }

  // Leaves the gradient of the sum.
  void go_back(scalar_t* of_score, const scalar_t* source, const scalar_t* destination,
               int64_t edge, scalar_t* of_destination) const {
    const scalar_t* term = term_of(edge);
    for (int64_t head = 0; head < heads; ++head) {
      if (!(sum(source, destination, term, head) > 0)) of_score[head] *= slope;
      of_destination[head] += of_score[head];
    }
  }

  void end_row(scalar_t*) const {}

  const scalar_t* term_of(int64_t edge) const {
    return terms == nullptr ? nullptr : terms + place[edge] * heads;
  }

  static scalar_t sum(const scalar_t* source, const scalar_t* destination, const scalar_t* term,
                      int64_t head) {
    const scalar_t of_ends = source[head] + destination[head];
    return term == nullptr ? of_ends : of_ends + term[head];
  }

  int64_t heads;
  int64_t count;
  scalar_t slope;
  Places<index_t> place;
  const scalar_t* terms;
};

// Checks what the edges add, beside a tensor of the weights that has so many rows.
void check_terms(const std::optional<at::Tensor>& terms, const Attended& given, int64_t rows) {
  if (terms) check_tensor("terms", *terms, given.source.scalar_type(), {rows, given.heads});
}

void attention(at::Tensor& out, const at::Tensor& source, const at::Tensor& destination,
               const std::optional<at::Tensor>& terms, const at::Tensor& places,
               const std::optional<at::Tensor>& weight_places, const at::Tensor& starts,
               double slope, double dropout, int64_t seed) {
  check_matrix("source", source);
  const Attended given(source, destination, source.size(1), places, weight_places, starts);
  const Dropout kept(dropout, seed);
  const int64_t rows = given.check_weights("out", out);
  check_terms(terms, given, rows);
  at::assert_no_overlap(out, source);
  at::assert_no_overlap(out, destination);
  if (terms) at::assert_no_overlap(out, *terms);
  AT_DISPATCH_FLOATING_TYPES(source.scalar_type(), "attention", [&] {
    AT_DISPATCH_INDEX_TYPES(given.all.kind, "attention", [&] {
      const SumScore<scalar_t, index_t> score(given, terms, rows, slope);
      attend<scalar_t, index_t>(out, given, kept, score);
    });
  });
}

void attention_backward(at::Tensor& of_score, at::Tensor& of_destination,
                        const at::Tensor& gradient, const at::Tensor& source,
                        const at::Tensor& destination, const std::optional<at::Tensor>& terms,
                        const at::Tensor& places, const std::optional<at::Tensor>& weight_places,
                        const at::Tensor& starts, double slope, double dropout, int64_t seed) {
  check_matrix("source", source);
  const int64_t heads = source.size(1);
  const Attended given(source, destination, heads, places, weight_places, starts);
  const Dropout kept(dropout, seed);
  const int64_t rows = given.check_weights("gradient", gradient);
  check_terms(terms, given, rows);
  check_tensor("of_score", of_score, source.scalar_type(), {rows, heads});
  check_tensor("of_destination", of_destination, source.scalar_type(), {given.edges.rows, heads});
  for (at::Tensor* to : {&of_score, &of_destination}) {
    for (const at::Tensor& one : {gradient, source, destination}) at::assert_no_overlap(*to, one);
    if (terms) at::assert_no_overlap(*to, *terms);
  }
  at::assert_no_overlap(of_score, of_destination);
  AT_DISPATCH_FLOATING_TYPES(source.scalar_type(), "attention_backward", [&] {
    AT_DISPATCH_INDEX_TYPES(given.all.kind, "attention_backward", [&] {
      const SumScore<scalar_t, index_t> score(given, terms, rows, slope);
      const auto score_of = [&](int64_t) { return score; };
      attend_backward<scalar_t, index_t>(of_score, of_destination, gradient, given, kept, score_of);
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
      "attention(Tensor(a!) out, Tensor source, Tensor destination, Tensor? terms, Tensor places,"
      " Tensor? weight_places, Tensor starts, float slope, float dropout, int seed) -> ()",
      &attention);
  library.def(
      "attention_backward(Tensor(a!) of_score, Tensor(b!) of_destination, Tensor gradient,"
      " Tensor source, Tensor destination, Tensor? terms, Tensor places, Tensor? weight_places,"
      " Tensor starts, float slope, float dropout, int seed) -> ()",
      &attention_backward);
  library.def("segment_sum(Tensor(a!) out, Tensor x, Tensor places, Tensor starts) -> ()",
              &segment_sum);
}

}  // namespace gact_graph
