// The quantizer on the GPU: see gact_graph/ops/quantize.py for the format, and
// csrc/cpu/quantize.cpp for the same on the CPU. Compiled for one width, GACT_BITS, or with 0 for a
// width of each group; and without contraction, which would round once where the other backends
// round twice.
//
// A warp processes one group after another, 256 elements at a time. Of every 32 elements four lanes
// hold eight each: lane j of them 4j to 4j + 3 and, 16 further on, the four that share a hash with
// those. So loads and stores are of 16 bytes, each hash is computed once, and two shuffles combine
// the 32 bits of a plane from four lanes.

#include "element.h"
#include "warp.h"

namespace gact_graph {

constexpr int kBits = GACT_BITS;
constexpr int kChunk = 256;                 // elements of a warp at a time
constexpr float kSmallestStep = 0x1p-110f;  // its reciprocal, times 2^16, is in float32's range

struct Stats {
  float low;
  float step;
};

// The width of a group, and the numbers that follow from it: constants if kBits is not 0.
struct Width {
  int bits;
  int top() const { return (1 << bits) - 1; }
  // Bits of noise below the code: the rest of a float32's 24 bits of significand, at most 16.
  int fraction() const { return bits <= 8 ? 16 : 24 - bits; }
  int quads() const { return (bits + 3) / 4; }  // planes, four at a time
};

// The width of each group and the words before it; neither if all have kBits.
struct Layout {
  const uint8_t* widths;
  const int64_t* first_words;
  int64_t of_group;  // tiles

  Width width(int64_t group) const {
    if constexpr (kBits != 0) return {kBits};
    return {widths[group]};
  }
  // The number of the first word of a tile of the group.
  int64_t word(int64_t group, int64_t tile, Width width) const {
    if constexpr (kBits != 0) return tile * kBits;
    return first_words[group] + (tile - group * of_group) * width.bits;
  }
};

// The position of a lane's elements in the chunk, and the plane, tile and half of its words.
struct Place {
  int first;  // of the four elements; the other four begin 16 further on
  int plane;  // of every four
  int tile;   // of the chunk
  int half;   // of the tile's words
  explicit Place(int lane)
      : first(lane / 4 * 32 + lane % 4 * 4), plane(lane % 4), tile(lane / 8), half(lane / 4 % 2) {}
  int element(int i) const { return first + (i & 3) + (i & 4) * 4; }
  int word(int quad, Width width) const {
    return (tile * width.bits + quad * 4 + plane) * 2 + half;
  }
  bool has(int quad, Width width, int64_t count) const {
    return quad * 4 + plane < width.bits && tile * kTile < count;
  }
};

// Loads eight elements from the chunk at x. The last element pads the chunk, which widens no range.
template <typename T>
void load(const T* x, int64_t count, Place place, float (&values)[8]) {
  if (count >= kChunk) {
    const auto front = *reinterpret_cast<const Vector<T, 4>*>(x + place.first);
    const auto back = *reinterpret_cast<const Vector<T, 4>*>(x + place.first + 16);
    for (int i = 0; i < 4; ++i) values[i] = to_float(front.at[i]);
    for (int i = 0; i < 4; ++i) values[4 + i] = to_float(back.at[i]);
    return;
  }
  for (int i = 0; i < 8; ++i) {
    const int64_t element = place.element(i);
    values[i] = to_float(x[element < count ? element : count - 1]);
  }
}

template <typename T>
void store(const T (&values)[8], int64_t count, Place place, T* x) {
  if (count >= kChunk) {
    Vector<T, 4> front, back;
    for (int i = 0; i < 4; ++i) front.at[i] = values[i];
    for (int i = 0; i < 4; ++i) back.at[i] = values[4 + i];
    *reinterpret_cast<Vector<T, 4>*>(x + place.first) = front;
    *reinterpret_cast<Vector<T, 4>*>(x + place.first + 16) = back;
    return;
  }
  for (int i = 0; i < 8; ++i) {
    if (place.element(i) < count) x[place.element(i)] = values[i];
  }
}

// A tensor that is packed as it is.
template <typename T>
struct Plain {
  const T* x;

  void load(int64_t start, int64_t count, Place place, float (&values)[8]) const {
    gact_graph::load(x + start, count, place, values);
  }
  double element(int64_t i) const { return to_double(x[i]); }
};

// A tensor whose channels are normalized while it is packed: element i is of channel i / inner,
// modulo the number of channels.
template <typename T>
struct Normalized {
  const T* x;
  const float* channels;  // the mean of each, then the deviation of each
  int64_t count;
  int64_t inner;

  float normalized(float value, int64_t channel) const {
    return (value - channels[channel]) / channels[count + channel];
  }
  void load(int64_t start, int64_t left, Place place, float (&values)[8]) const {
    gact_graph::load(x + start, left, place, values);
    const int64_t first = (start + place.first) / inner % count;
    for (int i = 0; i < 8; ++i) {
      const int64_t own = place.element(i) < left ? place.element(i) : left - 1;
      int64_t channel;
      if (inner == 1 && own >= place.first && first + own - place.first < 2 * count) {
        channel = first + own - place.first;
        if (channel >= count) channel -= count;
      } else {
        channel = (start + own) / inner % count;
      }
      values[i] = normalized(values[i], channel);
    }
  }
  double element(int64_t i) const { return normalized(to_float(x[i]), i / inner % count); }
};

// The minimum and maximum of a lane's elements, and whether all are finite.
struct Extent {
  float least = __uint_as_float(0x7F800000u);
  float greatest = __uint_as_float(0xFF800000u);
  float poison = 0.f;
  void add(const float (&values)[8]) {
    for (int i = 0; i < 8; ++i) {
      least = fminf(least, values[i]);
      greatest = fmaxf(greatest, values[i]);
      // Zero times Inf or NaN is NaN, which a sum keeps: cheaper than a test of each element.
      poison = fmaf(values[i], 0.f, poison);
    }
  }
};

float round_down_to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float((bits >> 31 ? bits + 0xFFFFu : bits) & 0xFFFF0000u);
}
float round_up_to_bf16(float x) {
  return __uint_as_float((__float_as_uint(x) + 0xFFFFu) & 0xFFFF0000u);
}

// The group's stats, the same in all lanes.
Stats stats_of(const Extent& extent, Width width) {
  const float nan = __uint_as_float(0x7FC00000u);
  const bool finite = !__any_sync(kAllLanes, extent.poison != extent.poison);
  const float least = least_of_warp(extent.least);
  const float greatest = greatest_of_warp(extent.greatest);
  if (!finite) return {nan, nan};
  const float low = round_down_to_bf16(least + 0.f);  // -0 becomes +0
  if (least == greatest) return {low, 0.f};
  const float step = round_up_to_bf16((greatest - low) / static_cast<float>(width.top()));
  if (!(step <= kFloatMax)) return {nan, nan};
  return {low, fmaxf(step, kSmallestStep)};
}

uint32_t code_of(float x, Stats stats, float scale, uint32_t noise, Width width) {
  const auto fine = static_cast<uint32_t>(__float2int_rn((x - stats.low) * scale));
  const uint32_t code = (fine + (noise >> (16 - width.fraction()))) >> width.fraction();
  const auto top = static_cast<uint32_t>(width.top());
  return code < top ? code : top;
}

// Encodes eight elements, the second four in the upper halves of the codes.
void encode(const float (&values)[8], Stats stats, uint32_t index, NoiseKey key, Width width,
            uint32_t (&codes)[4]) {
  const float scale = (1.f / stats.step) * static_cast<float>(1 << width.fraction());
  for (int i = 0; i < 4; ++i) {
    const uint32_t hash = noise_hash(noise_counter(index + i), key);
    codes[i] = code_of(values[i], stats, scale, hash & 0xFFFFu, width) |
               code_of(values[4 + i], stats, scale, hash >> 16, width) << 16;
  }
}

// Clears the codes after the last element.
void clear_tail(int64_t count, Place place, uint32_t (&codes)[4]) {
  for (int i = 0; i < 4; ++i) {
    if (place.element(i) >= count) codes[i] &= 0xFFFF0000u;
    if (place.element(i + 4) >= count) codes[i] &= 0x0000FFFFu;
  }
}

template <typename Source>
void pack(const Source& x, int64_t n, int64_t group_size, int64_t seed, uint32_t* words,
          uint32_t* stats, const uint8_t* widths, const int64_t* first_words) {
  const Layout layout = {widths, first_words, group_size / kTile};
  const Place place(lane_of_thread());
  uint64_t high = 0;
  NoiseKey key = noise_key(seed, 0);
  for (int64_t g = warp_of_thread(); g * group_size < n; g += warps_of_grid()) {
    const int64_t start = g * group_size;
    const int64_t count = group_size < n - start ? group_size : n - start;
    float values[8];
    Extent extent;
    for (int64_t t = 0; t < count; t += kChunk) {
      x.load(start + t, count - t, place, values);
      extent.add(values);
    }
    const Width width = layout.width(g);
    const Stats s = stats_of(extent, width);
    // Both are on bfloat16's grid.
    if (lane_of_thread() == 0) {
      stats[g] = __float_as_uint(s.low) >> 16 | (__float_as_uint(s.step) & 0xFFFF0000u);
    }
    for (int64_t t = 0; t < count; t += kChunk) {
      // A group of one chunk is still in registers.
      if (count > kChunk) x.load(start + t, count - t, place, values);
      uint32_t codes[4] = {};
      if (s.step > 0.f) {
        const uint64_t index = static_cast<uint64_t>(start + t) + place.first;
        if (index >> 32 != high) {
          high = index >> 32;
          key = noise_key(seed, index);
        }
        encode(values, s, static_cast<uint32_t>(index), key, width, codes);
        if (count - t < kChunk) clear_tail(count - t, place, codes);
      }
      uint32_t* out = words + layout.word(g, (start + t) / kTile, width) * 2;
      for (int quad = 0; quad < width.quads(); ++quad) {
        uint32_t nibbles = 0;
        for (int i = 0; i < 4; ++i) nibbles |= (codes[i] >> 4 * quad & 0x000F000Fu) << 4 * i;
        const uint32_t plane = transpose_lanes(transpose_bits(nibbles), lane_of_thread());
        if (place.has(quad, width, count - t)) out[place.word(quad, width)] = plane;
      }
      // A group of equal elements has its value in the word that this lane has just cleared.
      if (s.step == 0.f && t == 0 && place.tile == 0 && place.plane == 0) {
        const auto value = static_cast<uint64_t>(__double_as_longlong(x.element(start)));
        out[place.half] = static_cast<uint32_t>(place.half ? value >> 32 : value);
      }
    }
  }
}

// The level of a code in steps above low, in the decorrelated decoding.
float decorrelated_level(uint32_t code, uint32_t noise, Width width) {
  const uint32_t most = 1u << width.fraction();
  const uint32_t grains = code * most + most - 1 - 2 * (noise >> (16 - width.fraction()));
  return static_cast<float>(static_cast<int>(grains)) * (1.f / static_cast<float>(most));
}

template <typename T>
T value_of(float level, Stats stats) {
  if (stats.step != stats.step) return from_float<T>(__uint_as_float(0x7FC00000u));
  const float value = level * stats.step + stats.low;
  // The step is rounded up, and must not turn a finite value into infinity.
  return from_float<T>(fminf(fmaxf(value, -Element<T>::kMax), Element<T>::kMax));
}

// The value of a group of equal elements, from its first word.
template <typename T>
T equal_value(const uint32_t* word) {
  const uint64_t value = static_cast<uint64_t>(word[1]) << 32 | word[0];
  return Element<T>::of(__longlong_as_double(static_cast<int64_t>(value)));
}

// The elements of exact groups: rows of `width`, by ascending group.
template <typename T>
struct ExactGroups {
  const int64_t* groups;
  const T* values;
  int64_t count;
  int64_t width;

  // Returns the elements of a group, or null if it is not exact.
  const T* find(int64_t group, Stats stats) const {
    if (stats.step == stats.step) return nullptr;
    int64_t first = 0, last = count;
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (groups[middle] < group) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first < count && groups[first] == group ? values + first * width : nullptr;
  }
};

enum Decoding { kPlain, kDecorrelated, kMean };

// The seed is used by the decorrelated decoding, and the weight by the mean of both.
template <Decoding kDecoding, typename T>
void unpack(const uint32_t* words, const uint32_t* stats, const int64_t* exact_groups,
            const T* exact_values, int64_t exact_count, int64_t n, int64_t group_size, int64_t seed,
            T* x, const uint8_t* widths, const int64_t* first_words, const float* weight) {
  const Layout layout = {widths, first_words, group_size / kTile};
  const ExactGroups<T> exact = {exact_groups, exact_values, exact_count,
                                group_size < n ? group_size : n};
  const Place place(lane_of_thread());
  for (int64_t g = warp_of_thread(); g * group_size < n; g += warps_of_grid()) {
    const int64_t start = g * group_size;
    const int64_t count = group_size < n - start ? group_size : n - start;
    const Stats s = {__uint_as_float(stats[g] << 16), __uint_as_float(stats[g] & 0xFFFF0000u)};
    if (const T* own = exact.find(g, s)) {
      for (int64_t c = lane_of_thread(); c < count; c += kLanes) x[start + c] = own[c];
      continue;
    }
    const Width width = layout.width(g);
    const uint32_t* in = words + layout.word(g, start / kTile, width) * 2;
    const T same = s.step == 0.f ? equal_value<T>(in) : T{};
    for (int64_t t = 0; t < count; t += kChunk, in += kChunk / kTile * width.bits * 2) {
      uint32_t codes[4] = {};
      for (int quad = 0; quad < width.quads(); ++quad) {
        const uint32_t plane = place.has(quad, width, count - t) ? in[place.word(quad, width)] : 0;
        const uint32_t nibbles = transpose_bits(transpose_lanes(plane, lane_of_thread()));
        for (int i = 0; i < 4; ++i) codes[i] |= (nibbles >> 4 * i & 0x000F000Fu) << 4 * quad;
      }
      uint32_t hashes[4] = {};
      if constexpr (kDecoding != kPlain) {
        const uint64_t index = static_cast<uint64_t>(start + t) + place.first;
        const NoiseKey key = noise_key(seed, index);
        for (int i = 0; i < 4; ++i) {
          hashes[i] = noise_hash(noise_counter(static_cast<uint32_t>(index) + i), key);
        }
      }
      T values[8];
      for (int i = 0; i < 8; ++i) {
        const uint32_t code = i < 4 ? codes[i] & 0xFFFFu : codes[i - 4] >> 16;
        T value = value_of<T>(static_cast<float>(code), s);
        if constexpr (kDecoding != kPlain) {
          const uint32_t noise = i < 4 ? hashes[i] & 0xFFFFu : hashes[i - 4] >> 16;
          const T other = value_of<T>(decorrelated_level(code, noise, width), s);
          if constexpr (kDecoding == kDecorrelated) {
            value = other;
          } else if (!(other == value)) {
            value = (other - value) * *weight + value;
          }
        }
        values[i] = s.step == 0.f ? same : value;
      }
      store(values, count - t, place, x + start + t);
    }
  }
}

// A warp per row, a lane per element: rows begin anywhere in a tile, and 32 lanes read a word or
// two of a plane.
template <Decoding kDecoding, typename T>
void unpack_rows(const uint32_t* words, const uint32_t* stats, const int64_t* exact_groups,
                 const T* exact_values, int64_t exact_count, const int64_t* rows, int64_t count,
                 int64_t numel, int64_t width, int64_t group_size, int64_t seed, T* x,
                 const uint8_t* widths, const int64_t* first_words) {
  const Layout layout = {widths, first_words, group_size / kTile};
  const int64_t longest = group_size < numel ? group_size : numel;
  const ExactGroups<T> exact = {exact_groups, exact_values, exact_count, longest};
  const int64_t of_rows = numel / width;
  const uint32_t tiles_of_group = static_cast<uint32_t>(group_size / kTile);
  for (int64_t r = warp_of_thread(); r < count; r += warps_of_grid()) {
    // As in index_select, an index out of range is a device error.
    if (rows[r] < 0 || rows[r] >= of_rows) __trap();
    const int64_t start = rows[r] * width;
    for (int64_t c = lane_of_thread(); c < width; c += kLanes) {
      const auto tile = static_cast<uint32_t>((start + c) / kTile);
      const int element = static_cast<int>((start + c) % kTile);
      const uint32_t group = tile / tiles_of_group;
      const Stats s = {__uint_as_float(stats[group] << 16),
                       __uint_as_float(stats[group] & 0xFFFF0000u)};
      if (const T* values = exact.find(group, s)) {
        x[r * width + c] = values[start + c - group * group_size];
        continue;
      }
      const Width own = layout.width(group);
      const uint32_t* in = words + layout.word(group, tile, own) * 2 + element / 32;
      uint32_t code = 0;
      for (int p = 0; p < own.bits; ++p) code |= (in[p * 2] >> element % 32 & 1) << p;
      if (s.step == 0.f) {
        const int64_t first = static_cast<int64_t>(group) * tiles_of_group;
        x[r * width + c] = equal_value<T>(words + layout.word(group, first, own) * 2);
      } else {
        float level = static_cast<float>(code);
        if constexpr (kDecoding == kDecorrelated) {
          const auto index = static_cast<uint64_t>(start + c);
          const NoiseKey key = noise_key(seed, index);
          level = decorrelated_level(code, noise16(static_cast<uint32_t>(index), key), own);
        }
        x[r * width + c] = value_of<T>(level, s);
      }
    }
  }
}

}  // namespace gact_graph

#define GACT_UNPACK(name, T, kDecoding)                                                       \
  extern "C" __global__ void unpack##name(                                                    \
      const uint32_t* __restrict__ words, const uint32_t* __restrict__ stats,                 \
      const int64_t* __restrict__ exact_groups, const T* __restrict__ exact_values,           \
      int64_t exact_count, int64_t n, int64_t group_size, int64_t seed, T* __restrict__ x,    \
      const uint8_t* __restrict__ widths, const int64_t* __restrict__ first_words) {          \
    gact_graph::unpack<gact_graph::kDecoding>(words, stats, exact_groups, exact_values,       \
                                              exact_count, n, group_size, seed, x, widths,    \
                                              first_words, nullptr);                          \
  }                                                                                           \
  extern "C" __global__ void unpack_rows##name(                                               \
      const uint32_t* __restrict__ words, const uint32_t* __restrict__ stats,                 \
      const int64_t* __restrict__ exact_groups, const T* __restrict__ exact_values,           \
      int64_t exact_count, const int64_t* __restrict__ rows, int64_t count, int64_t numel,    \
      int64_t width, int64_t group_size, int64_t seed, T* __restrict__ x,                     \
      const uint8_t* __restrict__ widths, const int64_t* __restrict__ first_words) {          \
    gact_graph::unpack_rows<gact_graph::kDecoding>(words, stats, exact_groups, exact_values,  \
                                                   exact_count, rows, count, numel, width,    \
                                                   group_size, seed, x, widths, first_words); \
  }

#define GACT_KERNELS(name, T)                                                                   \
  extern "C" __global__ void pack_##name(                                                       \
      const T* __restrict__ x, int64_t n, int64_t group_size, int64_t seed,                     \
      uint32_t* __restrict__ words, uint32_t* __restrict__ stats,                               \
      const uint8_t* __restrict__ widths, const int64_t* __restrict__ first_words) {            \
    gact_graph::pack(gact_graph::Plain<T>{x}, n, group_size, seed, words, stats, widths,        \
                     first_words);                                                              \
  }                                                                                             \
  extern "C" __global__ void pack_normalized_##name(                                            \
      const T* __restrict__ x, int64_t n, int64_t group_size, int64_t seed,                     \
      uint32_t* __restrict__ words, uint32_t* __restrict__ stats,                               \
      const uint8_t* __restrict__ widths, const int64_t* __restrict__ first_words,              \
      const float* __restrict__ channels, int64_t count, int64_t inner) {                       \
    gact_graph::pack(gact_graph::Normalized<T>{x, channels, count, inner}, n, group_size, seed, \
                     words, stats, widths, first_words);                                        \
  }                                                                                             \
  GACT_UNPACK(_##name, T, kPlain)                                                               \
  GACT_UNPACK(_decorrelated_##name, T, kDecorrelated)

GACT_KERNELS(float32, float)
GACT_KERNELS(float64, double)
GACT_KERNELS(float16, gact_graph::Half)
GACT_KERNELS(bfloat16, gact_graph::BFloat16)

// The mean of both decodings, of float32 alone.
extern "C" __global__ void unpack_mean_float32(
    const uint32_t* __restrict__ words, const uint32_t* __restrict__ stats,
    const int64_t* __restrict__ exact_groups, const float* __restrict__ exact_values,
    int64_t exact_count, int64_t n, int64_t group_size, int64_t seed, float* __restrict__ x,
    const uint8_t* __restrict__ widths, const int64_t* __restrict__ first_words,
    const float* __restrict__ weight) {
  gact_graph::unpack<gact_graph::kMean>(words, stats, exact_groups, exact_values, exact_count, n,
                                        group_size, seed, x, widths, first_words, weight);
}
