// Bit masks on the GPU: see gact_graph/ops/bitmask.py for the format.
//
// A lane processes 16 bytes of elements at a time. Shuffles combine the bits of adjacent lanes to
// halves of words.

#include "element.h"
#include "warp.h"

namespace gact_graph {

constexpr int kHalf = kTile / 2;

// Types narrower than float32 are compared in float32.
template <typename T>
struct Compared {
  using Type = float;
};
template <>
struct Compared<double> {
  using Type = double;
};

inline double compared(double x) { return x; }
template <typename T>
inline float compared(T x) {
  return to_float(x);
}

struct Nonzero {
  template <typename Integer>
  bool operator()(Integer x) const {
    return x != 0;
  }
  bool operator()(Half x) const { return to_float(x) != 0.f; }
  bool operator()(BFloat16 x) const { return to_float(x) != 0.f; }
};
template <typename T>
struct Above {
  typename Compared<T>::Type threshold;
  bool operator()(T x) const { return compared(x) > threshold; }
};
template <typename T>
struct NotAtMost {
  typename Compared<T>::Type threshold;
  bool operator()(T x) const { return !(compared(x) <= threshold); }
};

// Calls f(elements, count, half) for each lane's 16 bytes of x: the elements, their number, and the
// half word of their bits. All lanes of a warp take part.
template <typename T, typename F>
void for_each_vector(const T* x, int64_t n, F f) {
  constexpr int kEach = 16 / sizeof(T);
  constexpr int kOfWarp = kEach * kLanes;
  for (int64_t w = warp_of_thread(); w * kOfWarp < n; w += warps_of_grid()) {
    const int64_t start = w * kOfWarp + lane_of_thread() * kEach;
    const int64_t left = n - start;
    Vector<T, kEach> elements = {};
    const int count = left >= kEach ? kEach : left > 0 ? static_cast<int>(left) : 0;
    if (count == kEach) {
      elements = *reinterpret_cast<const Vector<T, kEach>*>(x + start);
    } else {
      // Not up to `count`: an array indexed by a variable would live in memory.
      for (int i = 0; i < kEach; ++i) {
        if (i < count) elements.at[i] = x[start + i];
      }
    }
    f(elements, count, start / kHalf);
  }
}

// Combines the bits of the lanes of a half word; the first of these lanes has the result.
template <int kEach>
uint32_t join(uint32_t bits) {
  constexpr int kTogether = kHalf / kEach;
  bits <<= lane_of_thread() % kTogether * kEach;
  for (int far = 1; far < kTogether; far *= 2) bits |= __shfl_xor_sync(kAllLanes, bits, far);
  return bits;
}
template <int kEach>
bool is_first() {
  return lane_of_thread() % (kHalf / kEach) == 0;
}

template <typename T, typename Test>
void pack(const T* x, int64_t n, Test test, uint32_t* words) {
  constexpr int kEach = 16 / sizeof(T);
  // Both halves of the last word, even if the second has no elements.
  const int64_t halves = (n + kTile - 1) / kTile * 2;
  for_each_vector(x, n, [&](const Vector<T, kEach>& elements, int count, int64_t half) {
    uint32_t bits = 0;
    for (int i = 0; i < kEach; ++i) {
      bits |= static_cast<uint32_t>(i < count && test(elements.at[i])) << i;
    }
    bits = join<kEach>(bits);
    if (is_first<kEach>() && half < halves) words[half] = bits;
  });
}

template <typename Raw>
void pack_pair(const Raw* x, int64_t n, Raw low, Raw high, uint32_t* words, uint8_t* matched) {
  pack(
      x, n,
      [&](Raw element) {
        // All lanes that find another value write the same, so their order is irrelevant.
        if (element != low && element != high) *matched = 0;
        return element == high;
      },
      words);
}

template <typename Raw>
void unpack(const uint32_t* words, int64_t n, Raw low, Raw high, Raw* x) {
  constexpr int kEach = 16 / sizeof(Raw);
  constexpr int kOfWarp = kEach * kLanes;
  for (int64_t w = warp_of_thread(); w * kOfWarp < n; w += warps_of_grid()) {
    const int64_t start = w * kOfWarp + lane_of_thread() * kEach;
    if (start >= n) continue;
    const uint32_t bits = words[start / kHalf] >> (start % kHalf);
    Vector<Raw, kEach> elements;
    for (int i = 0; i < kEach; ++i) elements.at[i] = bits >> i & 1 ? high : low;
    if (n - start >= kEach) {
      *reinterpret_cast<Vector<Raw, kEach>*>(x + start) = elements;
    } else {
      for (int i = 0; i < kEach; ++i) {
        if (i < n - start) x[start + i] = elements.at[i];
      }
    }
  }
}

}  // namespace gact_graph

#define GACT_NONZERO(name, T)                                                   \
  extern "C" __global__ void nonzero_##name(const T* __restrict__ x, int64_t n, \
                                            uint32_t* __restrict__ words) {     \
    gact_graph::pack(x, n, gact_graph::Nonzero{}, words);                       \
  }
// Integers by their size. A bool is read as a byte: a view of another dtype may hold other values
// than 0 and 1.
GACT_NONZERO(1, uint8_t)
GACT_NONZERO(2, uint16_t)
GACT_NONZERO(4, uint32_t)
GACT_NONZERO(8, uint64_t)
GACT_NONZERO(float32, float)
GACT_NONZERO(float64, double)
GACT_NONZERO(float16, gact_graph::Half)
GACT_NONZERO(bfloat16, gact_graph::BFloat16)

#define GACT_TESTS(name, T)                                                                       \
  extern "C" __global__ void above_##name(const T* __restrict__ x, int64_t n, double threshold,   \
                                          uint32_t* __restrict__ words) {                         \
    using Number = gact_graph::Compared<T>::Type;                                                 \
    gact_graph::pack(x, n, gact_graph::Above<T>{static_cast<Number>(threshold)}, words);          \
  }                                                                                               \
  extern "C" __global__ void not_at_most_##name(const T* __restrict__ x, int64_t n,               \
                                                double threshold, uint32_t* __restrict__ words) { \
    using Number = gact_graph::Compared<T>::Type;                                                 \
    gact_graph::pack(x, n, gact_graph::NotAtMost<T>{static_cast<Number>(threshold)}, words);      \
  }
GACT_TESTS(float32, float)
GACT_TESTS(float64, double)
GACT_TESTS(float16, gact_graph::Half)
GACT_TESTS(bfloat16, gact_graph::BFloat16)

#define GACT_PAIRS(name, Raw)                                                                     \
  extern "C" __global__ void pack_pair_##name(const Raw* __restrict__ x, int64_t n, int64_t low,  \
                                              int64_t high, uint32_t* __restrict__ words,         \
                                              uint8_t* __restrict__ matched) {                    \
    gact_graph::pack_pair(x, n, static_cast<Raw>(low), static_cast<Raw>(high), words, matched);   \
  }                                                                                               \
  extern "C" __global__ void unpack_bits_##name(const uint32_t* __restrict__ words, int64_t n,    \
                                                int64_t low, int64_t high, Raw* __restrict__ x) { \
    gact_graph::unpack(words, n, static_cast<Raw>(low), static_cast<Raw>(high), x);               \
  }
GACT_PAIRS(1, uint8_t)
GACT_PAIRS(2, uint16_t)
GACT_PAIRS(4, uint32_t)
GACT_PAIRS(8, uint64_t)
