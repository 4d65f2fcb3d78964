// Attention weights on the GPU for any score of edges, and their gradients: see
// gact_graph/ops/attention.py, leaky_attention.py and dot_attention.py, and csrc/cpu/attention.h
// for the same on the CPU.
//
// Weights overwrite the scores. Further memory is only a few numbers for each row and head: the
// maximum score and the sum of exponentials, and in backward the weighted mean of the gradients.

#include "segments.h"

namespace gact_graph {

inline float exp_of(float x) { return expf(x); }
inline double exp_of(double x) { return exp(x); }
inline float greater(float a, float b) { return fmaxf(a, b); }
inline double greater(double a, double b) { return fmax(a, b); }

template <typename T>
T leaky(T x, T slope) {
  return x > 0 ? x : x * slope;
}

// The factor of dropout: a pure function of the seed and the index of a weight, the same on every
// backend.
struct Dropout {
  int64_t dropped;  // of 65536
  double scale;
  int64_t seed;

  template <typename T>
  T factor(int64_t i) const {
    if (dropped == 0) return 1;
    const auto index = static_cast<uint64_t>(i);
    const NoiseKey key = noise_key(static_cast<uint64_t>(seed), index);
    return noise16(static_cast<uint32_t>(index), key) < dropped ? T(0) : static_cast<T>(scale);
  }
};

// The maximum score of a row, and the sum of the exponentials of scores minus the maximum.
template <typename T>
struct Softmax {
  using State = Vector<T, 2>;
  using Input = T;

  void take(int64_t unit) { head = unit; }
  State none() const { return {{-static_cast<T>(__uint_as_float(0x7F800000u)), 0}}; }
  Input read(int64_t, int64_t edge) const { return scores[places[edge] * units + head] * scale; }
  void add(State& state, Input score) const { state = merge(state, {{score, 1}}); }
  State merge(const State& a, const State& b) const {
    const T maximum = greater(a.at[0], b.at[0]);
    return {{maximum, rescaled(a, maximum) + rescaled(b, maximum)}};
  }
  State result(const State& state) const { return state; }

  // Keeps NaN, since no comparison with it holds; fmax ignores it.
  T rescaled(const State& state, T maximum) const {
    const bool empty = state.at[0] < -static_cast<T>(kFloatMax) && state.at[0] == maximum;
    return empty ? state.at[1] : state.at[1] * exp_of(state.at[0] - maximum);
  }

  int64_t units;
  const T* scores;
  Places places;
  T scale;
  int64_t head = 0;
};

// The mean of the gradients of a row's weights, weighted by the weights.
template <typename T>
struct Mean {
  using State = Vector<T, 1>;
  struct Input {
    T weight;
    T gradient;
  };

  void take(int64_t unit) { head = unit; }
  State none() const { return {}; }
  Input read(int64_t, int64_t edge) const {
    const int64_t at = places[edge] * units + head;
    return {weight[at], gradient[at] * dropout.template factor<T>(at)};
  }
  void add(State& state, const Input& edge) const { state.at[0] += edge.weight * edge.gradient; }
  State merge(const State& a, const State& b) const { return plus(a, b); }
  State result(const State& state) const { return state; }

  int64_t units;
  const T* weight;
  const T* gradient;
  Places places;
  Dropout dropout;
  int64_t head = 0;
};

// The gradient of the sum of an edge's rows, whose LeakyReLU times a vector is the score. It is
// added up for the rows, or multiplied by LeakyReLU's input for the gradient of the vector.
template <typename T, int kEach, bool kOfVector>
struct LeakyRows {
  using State = Vector<T, kEach>;
  struct Input {
    State sum;
    T of_score;
  };

  void take(int64_t unit) {
    column = unit * kEach;
    head = column / each;
  }
  State none() const { return {}; }
  Input read(int64_t row, int64_t edge) const {
    const int64_t width = units * kEach;
    const auto a = *reinterpret_cast<const State*>(rows + row * width + column);
    const auto b = *reinterpret_cast<const State*>(others + places[edge] * width + column);
    return {plus(a, b), of_score[score_places[edge] * heads + head]};
  }
  void add(State& state, const Input& edge) const {
    for (int i = 0; i < kEach; ++i) {
      const T sum = edge.sum.at[i];
      const T of_sum = sum > 0 ? edge.of_score : edge.of_score * slope;
      state.at[i] += kOfVector ? of_sum * sum : of_sum;
    }
  }
  State merge(const State& a, const State& b) const { return plus(a, b); }
  State result(State state) const {
    if (!kOfVector) {
      for (int i = 0; i < kEach; ++i) state.at[i] *= vector[column + i];
    }
    return state;
  }

  int64_t units;
  const T* of_score;
  Places score_places;
  const T* rows;
  const T* others;
  Places places;
  const T* vector;
  T slope;
  int64_t heads;
  int64_t each;
  int64_t column = 0;
  int64_t head = 0;
};

// The sum of the scores of source, destination and, if there are terms, edge.
template <typename T>
T sum_of(T source, T destination, const T* terms, int64_t at) {
  const T ends = source + destination;
  return terms == nullptr ? ends : ends + terms[at];
}

template <typename T>
void sum_scores(const T* source, const Places& places, const T* destination, const T* terms,
                T slope, const Edges& edges, int64_t heads, T* out, const Places& out_places) {
  for_each_head(edges, heads, Layout(1), [&](int64_t row, int64_t edge, int64_t head, bool within) {
    if (!within) return;
    const T a = source[places[edge] * heads + head], b = destination[row * heads + head];
    const int64_t at = out_places[edge] * heads + head;
    out[at] = leaky(sum_of(a, b, terms, at), slope);
  });
}

template <typename T, int kEach>
void leaky_scores(const T* source, const Places& places, const T* destination, const T* vector,
                  T slope, const Edges& edges, int64_t heads, int64_t each, T* out,
                  const Places& out_places) {
  using Columns = Vector<T, kEach>;
  const int64_t width = heads * each;
  const auto term = [&](int64_t row, int64_t edge, int64_t column) {
    const auto a = *reinterpret_cast<const Columns*>(source + places[edge] * width + column);
    const auto b = *reinterpret_cast<const Columns*>(destination + row * width + column);
    const auto by = *reinterpret_cast<const Columns*>(vector + column);
    T score = 0;
    for (int i = 0; i < kEach; ++i) score += leaky(a.at[i] + b.at[i], slope) * by.at[i];
    return score;
  };
  sum_heads<T, kEach>(edges, heads, each, term, [&](int64_t, int64_t edge, int64_t head, T score) {
    out[out_places[edge] * heads + head] = score;
  });
}

// Replaces scores by weights.
template <typename T>
void weigh(T* weight, const Places& places, T scale, const T* softmax, const Dropout& dropout,
           const Edges& edges, int64_t heads) {
  for_each_head(edges, heads, Layout(1), [&](int64_t row, int64_t edge, int64_t head, bool within) {
    if (!within) return;
    const int64_t at = places[edge] * heads + head;
    const T* of_row = softmax + (row * heads + head) * 2;
    // As in PyG's softmax.
    const T w = exp_of(weight[at] * scale - of_row[0]) / (of_row[1] + static_cast<T>(1e-16));
    weight[at] = w * dropout.factor<T>(at);
  });
}

// Writes the gradients of scores, times `scale`; with a source, the gradients of LeakyReLU's
// inputs.
template <typename T>
void backward(T* out, const T* weight, const T* gradient, const Places& places, const T* mean,
              T scale, const Dropout& dropout, const T* source, const Places& source_places,
              const T* destination, const T* terms, T slope, const Edges& edges, int64_t heads) {
  for_each_head(edges, heads, Layout(1), [&](int64_t row, int64_t edge, int64_t head, bool within) {
    if (!within) return;
    const int64_t at = places[edge] * heads + head, of_row = row * heads + head;
    T of_score = weight[at] * (gradient[at] * dropout.factor<T>(at) - mean[of_row]) * scale;
    if (source != nullptr) {
      const T a = source[source_places[edge] * heads + head];
      if (!(sum_of(a, destination[of_row], terms, at) > 0)) of_score *= slope;
    }
    out[at] = of_score;
  });
}

template <typename T>
void drop(T* weight, int64_t count, const Dropout& dropout) {
  for (int64_t i = warp_of_thread() * kLanes + lane_of_thread(); i < count;
       i += warps_of_grid() * kLanes) {
    weight[i] *= dropout.factor<T>(i);
  }
}

}  // namespace gact_graph

// Places are three arguments: a pointer, whether they are int64, and the number of rows they index.
// Pointers that may belong to the same tensor are not __restrict__.
#define GACT_ATTENTION(name, T)                                                                    \
  extern "C" __global__ void GACT_BOUNDS sum_scores_##name(                                        \
      const T* __restrict__ source, const void* __restrict__ places, int64_t wide, int64_t nodes,  \
      const T* __restrict__ destination, const T* __restrict__ terms, double slope,                \
      const int64_t* __restrict__ starts, int64_t rows, int64_t count, int64_t length,             \
      int64_t heads, T* __restrict__ out, const void* __restrict__ out_places, int64_t out_wide,   \
      int64_t weights) {                                                                           \
    gact_graph::sum_scores<T>(source, {places, wide, nodes}, destination, terms,                   \
                              static_cast<T>(slope), {starts, rows, count, length}, heads, out,    \
                              {out_places, out_wide, weights});                                    \
  }                                                                                                \
  extern "C" __global__ void GACT_BOUNDS softmax_##name(                                           \
      const T* __restrict__ scores, const void* __restrict__ places, int64_t wide,                 \
      int64_t weights, double scale, const int64_t* __restrict__ starts, int64_t rows,             \
      int64_t count, int64_t length, int64_t heads, T* __restrict__ out, T* __restrict__ carry) {  \
    using Softmax = gact_graph::Softmax<T>;                                                        \
    const Softmax softmax{heads, scores, {places, wide, weights}, static_cast<T>(scale)};          \
    gact_graph::reduce_rows(softmax, {starts, rows, count, length},                                \
                            reinterpret_cast<Softmax::State*>(out),                                \
                            reinterpret_cast<Softmax::State*>(carry));                             \
  }                                                                                                \
  extern "C" __global__ void GACT_BOUNDS softmax_carries_##name(                                   \
      const int64_t* __restrict__ starts, int64_t rows, int64_t count, int64_t length,             \
      int64_t heads, T* __restrict__ out, const T* __restrict__ carry) {                           \
    using Softmax = gact_graph::Softmax<T>;                                                        \
    const Softmax softmax{heads, nullptr, {}, 1};                                                  \
    gact_graph::merge_carries(softmax, {starts, rows, count, length},                              \
                              reinterpret_cast<Softmax::State*>(out),                              \
                              reinterpret_cast<const Softmax::State*>(carry));                     \
  }                                                                                                \
  extern "C" __global__ void GACT_BOUNDS weigh_##name(                                             \
      T* __restrict__ weight, const void* __restrict__ places, int64_t wide, int64_t weights,      \
      double scale, const T* __restrict__ softmax, int64_t dropped, double kept, int64_t seed,     \
      const int64_t* __restrict__ starts, int64_t rows, int64_t count, int64_t length,             \
      int64_t heads) {                                                                             \
    gact_graph::weigh<T>(weight, {places, wide, weights}, static_cast<T>(scale), softmax,          \
                         {dropped, kept, seed}, {starts, rows, count, length}, heads);             \
  }                                                                                                \
  extern "C" __global__ void GACT_BOUNDS mean_##name(                                              \
      const T* weight, const T* gradient, const void* __restrict__ places, int64_t wide,           \
      int64_t weights, int64_t dropped, double kept, int64_t seed,                                 \
      const int64_t* __restrict__ starts, int64_t rows, int64_t count, int64_t length,             \
      int64_t heads, T* __restrict__ out, T* __restrict__ carry) {                                 \
    using Mean = gact_graph::Mean<T>;                                                              \
    const Mean mean{heads, weight, gradient, {places, wide, weights}, {dropped, kept, seed}};      \
    gact_graph::reduce_rows(mean, {starts, rows, count, length},                                   \
                            reinterpret_cast<Mean::State*>(out),                                   \
                            reinterpret_cast<Mean::State*>(carry));                                \
  }                                                                                                \
  extern "C" __global__ void GACT_BOUNDS backward_##name(                                          \
      T* out, const T* weight, const T* gradient, const void* __restrict__ places, int64_t wide,   \
      int64_t weights, const T* __restrict__ mean, double scale, int64_t dropped, double kept,     \
      int64_t seed, const T* __restrict__ source, const void* __restrict__ source_places,          \
      int64_t source_wide, int64_t nodes, const T* __restrict__ destination,                       \
      const T* __restrict__ terms, double slope, const int64_t* __restrict__ starts, int64_t rows, \
      int64_t count, int64_t length, int64_t heads) {                                              \
    gact_graph::backward<T>(out, weight, gradient, {places, wide, weights}, mean,                  \
                            static_cast<T>(scale), {dropped, kept, seed}, source,                  \
                            {source_places, source_wide, nodes}, destination, terms,               \
                            static_cast<T>(slope), {starts, rows, count, length}, heads);          \
  }                                                                                                \
  extern "C" __global__ void GACT_BOUNDS drop_##name(T* __restrict__ weight, int64_t count,        \
                                                     int64_t dropped, double kept, int64_t seed) { \
    gact_graph::drop<T>(weight, count, {dropped, kept, seed});                                     \
  }

#define GACT_LEAKY(name, T, kEach)                                                                \
  extern "C" __global__ void GACT_BOUNDS leaky_scores_##name##_##kEach(                           \
      const T* __restrict__ source, const void* __restrict__ places, int64_t wide, int64_t nodes, \
      const T* __restrict__ destination, const T* __restrict__ vector, double slope,              \
      const int64_t* __restrict__ starts, int64_t rows, int64_t count, int64_t length,            \
      int64_t heads, int64_t each, T* __restrict__ out, const void* __restrict__ out_places,      \
      int64_t out_wide, int64_t weights) {                                                        \
    gact_graph::leaky_scores<T, kEach>(source, {places, wide, nodes}, destination, vector,        \
                                       static_cast<T>(slope), {starts, rows, count, length},      \
                                       heads, each, out, {out_places, out_wide, weights});        \
  }                                                                                               \
  extern "C" __global__ void GACT_BOUNDS leaky_rows_##name##_##kEach(                             \
      const T* __restrict__ of_score, const void* __restrict__ score_places, int64_t score_wide,  \
      int64_t weights, const T* __restrict__ own, const T* __restrict__ others,                   \
      const void* __restrict__ places, int64_t wide, int64_t nodes, const T* __restrict__ vector, \
      double slope, const int64_t* __restrict__ starts, int64_t rows, int64_t count,              \
      int64_t length, int64_t heads, int64_t each, T* __restrict__ out, T* __restrict__ carry) {  \
    using Rows = gact_graph::LeakyRows<T, kEach, false>;                                          \
    const Rows all{heads * each / kEach,                                                          \
                   of_score,                                                                      \
                   {score_places, score_wide, weights},                                           \
                   own,                                                                           \
                   others,                                                                        \
                   {places, wide, nodes},                                                         \
                   vector,                                                                        \
                   static_cast<T>(slope),                                                         \
                   heads,                                                                         \
                   each};                                                                         \
    gact_graph::reduce_rows(all, {starts, rows, count, length},                                   \
                            reinterpret_cast<Rows::State*>(out),                                  \
                            reinterpret_cast<Rows::State*>(carry));                               \
  }                                                                                               \
  extern "C" __global__ void GACT_BOUNDS leaky_vector_##name##_##kEach(                           \
      const T* __restrict__ of_score, const void* __restrict__ score_places, int64_t score_wide,  \
      int64_t weights, const T* __restrict__ own, const T* __restrict__ others,                   \
      const void* __restrict__ places, int64_t wide, int64_t nodes, double slope,                 \
      const int64_t* __restrict__ starts, int64_t rows, int64_t count, int64_t length,            \
      int64_t heads, int64_t each, T* __restrict__ out) {                                         \
    using Rows = gact_graph::LeakyRows<T, kEach, true>;                                           \
    const Rows all{heads * each / kEach,                                                          \
                   of_score,                                                                      \
                   {score_places, score_wide, weights},                                           \
                   own,                                                                           \
                   others,                                                                        \
                   {places, wide, nodes},                                                         \
                   nullptr,                                                                       \
                   static_cast<T>(slope),                                                         \
                   heads,                                                                         \
                   each};                                                                         \
    gact_graph::reduce_segments(all, {starts, rows, count, length},                               \
                                reinterpret_cast<Rows::State*>(out));                             \
  }

GACT_ATTENTION(float32, float)
GACT_ATTENTION(float64, double)
GACT_LEAKY(float32, float, 1)
GACT_LEAKY(float32, float, 2)
GACT_LEAKY(float32, float, 4)
GACT_LEAKY(float64, double, 1)
GACT_LEAKY(float64, double, 2)
