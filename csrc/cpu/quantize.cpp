// The quantizer on the CPU: see gact_graph/ops/quantize.py for the format. The unit of work is a
// tile of 64 elements: b words of 64 bits, one for each bit of the code.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"
#include "dtypes.h"
#include "lanes.h"
#include "memory.h"
#include "parallel.h"

namespace gact_graph {
namespace {

constexpr int kMostBits = 16;

int64_t tiles_of(int64_t count) { return ceil_div(count, kTile); }

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
float round_down_to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  return float_of((bits >> 31 ? bits + 0xFFFFu : bits) & 0xFFFF0000u);
}
float round_up_to_bf16(float x) { return float_of((bits_of(x) + 0xFFFFu) & 0xFFFF0000u); }

struct Stats {
  float low;
  float step;
};

// The smallest step whose reciprocal, times the 2^16 grains of the noise, is in float32's range:
// 2^-110.
constexpr float kSmallestStep = 7.70371977754894341e-34f;

Stats stats_of(const Extent& extent, int top) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (!extent.finite()) return {nan, nan};
  const float low = round_down_to_bf16(extent.min() + 0.f);  // -0 becomes +0
  if (extent.min() == extent.max()) return {low, 0.f};
  const float step = round_up_to_bf16((extent.max() - low) / static_cast<float>(top));
  if (!std::isfinite(step)) return {nan, nan};
  return {low, std::max(step, kSmallestStep)};
}

// The functions for one width, behind pointers, so that all element types share one instance.
struct Coder {
  void (*encode)(const float* x, int64_t tiles, Stats stats, uint64_t index, uint64_t seed,
                 uint64_t* words);
  void (*decode)(const uint64_t* words, int64_t tiles, Stats stats, float limit, uint64_t index,
                 uint64_t seed, float* x);
  decltype(decode) decode_decorrelated;
};

template <int kBits>
void encode_tiles(const float* x, int64_t tiles, Stats stats, uint64_t index, uint64_t seed,
                  uint64_t* words) {
  const float scale = (1.f / stats.step) * static_cast<float>(1 << fraction_bits(kBits));
  NoiseKey key = noise_key(seed, index);
  for (int64_t t = 0; t < tiles; ++t, x += kTile, words += kBits, index += kTile) {
    if (static_cast<uint32_t>(index) == 0) key = noise_key(seed, index);
    encode_tile<kBits>(x, stats.low, scale, static_cast<uint32_t>(index), key, words);
  }
}

template <int kBits, bool kDecorrelated>
void decode_tiles(const uint64_t* words, int64_t tiles, Stats stats, float limit, uint64_t index,
                  uint64_t seed, float* x) {
  NoiseKey key = {};
  if constexpr (kDecorrelated) key = noise_key(seed, index);
  for (int64_t t = 0; t < tiles; ++t, words += kBits, x += kTile, index += kTile) {
    if constexpr (kDecorrelated) {
      if (static_cast<uint32_t>(index) == 0) key = noise_key(seed, index);
    }
    decode_tile<kBits, kDecorrelated>(words, stats.low, stats.step, limit,
                                      static_cast<uint32_t>(index), key, x);
  }
}

template <int... kMinusOne>
const Coder& coder_of(int64_t bits, std::integer_sequence<int, kMinusOne...>) {
  static constexpr Coder kCoders[] = {{&encode_tiles<kMinusOne + 1>,
                                       &decode_tiles<kMinusOne + 1, false>,
                                       &decode_tiles<kMinusOne + 1, true>}...};
  return kCoders[bits - 1];
}
const Coder& coder_of(int64_t bits) {
  return coder_of(bits, std::make_integer_sequence<int, kMostBits>{});
}

template <typename T>
float limit_of() {
  return sizeof(T) > 2 ? std::numeric_limits<float>::max()
                       : static_cast<float>(std::numeric_limits<T>::max());
}

// A decoding of codes for elements of type T: decorrelated if there is a seed, else plain.
template <typename T>
class Decoder {
 public:
  explicit Decoder(std::optional<int64_t> seed)
      : decode_(seed ? &Coder::decode_decorrelated : &Coder::decode),
        seed_(static_cast<uint64_t>(seed.value_or(0))) {}
  void operator()(const uint64_t* words, int64_t bits, int64_t tiles, Stats stats, int64_t index,
                  float* x) const {
    const Coder& coder = coder_of(bits);
    (coder.*decode_)(words, tiles, stats, limit_, static_cast<uint64_t>(index), seed_, x);
  }

 private:
  float limit_ = limit_of<T>();
  decltype(&Coder::decode) decode_;
  uint64_t seed_;
};

// The first word and the width of each group of n elements: one width for all, or a width of each.
class Layout {
 public:
  struct Group {
    int64_t number;
    int64_t word;
    int64_t bits;
  };

  Layout(int64_t n, int64_t bits, int64_t group_size, const std::optional<Tensor>& widths,
         int64_t words)
      : bits_(bits), tiles_(group_size / kTile) {
    if (!widths) return;
    const int64_t groups = ceil_div(n, group_size);
    check_tensor("widths", *widths, ScalarType::Byte, {groups});
    widths_ = const_data<uint8_t>(*widths);
    int64_t total = 0;
    for (int64_t g = 0; g < groups; g += kSpan) {
      starts_.push_back(total);
      for (int64_t i = g; i < std::min(g + kSpan, groups); ++i) {
        GACT_CHECK_VALUE(1 <= widths_[i] && widths_[i] <= kMostBits, "Expected widths from 1 to ",
                         kMostBits, " (got ", static_cast<int>(widths_[i]), ")");
        total += widths_[i] * tiles_;
      }
    }
    if (groups > 0) total -= widths_[groups - 1] * (groups * tiles_ - tiles_of(n));
    GACT_CHECK_VALUE(total == words, "Expected widths of ", words, " words (got ", total, ")");
  }

  Group operator[](int64_t number) const {
    if (widths_ == nullptr) return {number, number * tiles_ * bits_, bits_};
    int64_t word = starts_[number / kSpan];
    for (int64_t i = number / kSpan * kSpan; i < number; ++i) word += widths_[i] * tiles_;
    return {number, word, widths_[number]};
  }

  // The group that follows, which must exist.
  Group after(const Group& group) const {
    const int64_t next = group.number + 1;
    return {next, group.word + group.bits * tiles_, widths_ == nullptr ? bits_ : widths_[next]};
  }

 private:
  static constexpr int64_t kSpan = 8;  // groups; starts of all would take longer to compute
  int64_t bits_;
  int64_t tiles_;
  const uint8_t* widths_ = nullptr;
  std::vector<int64_t> starts_;
};

// Elements of a buffer, which stays in the fastest cache.
constexpr int64_t kBlock = 4 * kTile;

// The mean and the deviation of each channel; without any, elements stay what they are. Element i
// is of channel i / inner, modulo the number of channels.
class Channels {
 public:
  Channels(const std::optional<Tensor>& channels, int64_t inner, int64_t n) : inner_(inner) {
    if (!channels) return;
    check_dim("channels", *channels, 2);
    count_ = channels->size(1);
    check_tensor("channels", *channels, ScalarType::Float, {2, count_});
    GACT_CHECK_VALUE(inner > 0 && count_ > 0 && n % inner == 0 && n / inner % count_ == 0,
                     "Expected channels that divide ", n, " elements (got ", count_, " of ", inner,
                     ")");
    mean_ = const_data<float>(*channels);
    deviation_ = mean_ + count_;
  }
  explicit operator bool() const { return count_ > 0; }

  // Normalizes `count` elements from `index` on.
  void normalize(int64_t index, int64_t count, float* x) const {
    while (count > 0) {
      const int64_t channel = index / inner_ % count_;
      int64_t run;
      if (inner_ == 1) {
        run = std::min(count, count_ - channel);
        for (int64_t i = 0; i < run; ++i) {
          x[i] = (x[i] - mean_[channel + i]) / deviation_[channel + i];
        }
      } else {
        run = std::min(count, inner_ - index % inner_);
        const float mean = mean_[channel], deviation = deviation_[channel];
        for (int64_t i = 0; i < run; ++i) x[i] = (x[i] - mean) / deviation;
      }
      index += run, x += run, count -= run;
    }
  }

 private:
  int64_t inner_;
  int64_t count_ = 0;
  const float* mean_ = nullptr;
  const float* deviation_ = nullptr;
};

// Returns `count` elements from `index` on as float32 in whole tiles, normalized. The last tile is
// padded with its last element, which widens no range. Whole tiles of float32 without channels are
// not copied.
template <typename T>
const float* as_tiles(const T* x, int64_t index, int64_t count, const Channels& channels,
                      float* buffer) {
  x += index;
  if constexpr (std::is_same_v<T, float>) {
    if (!channels && count % kTile == 0) return x;
  }
  const int64_t whole = count / kTile * kTile;
  for (int64_t t = 0; t < whole; t += kTile) widen_tile(x + t, buffer + t);
  for (int64_t i = whole; i < count; ++i) buffer[i] = static_cast<float>(x[i]);
  if (channels) channels.normalize(index, count, buffer);
  std::fill(buffer + count, buffer + tiles_of(count) * kTile, buffer[count - 1]);
  return buffer;
}

// Returns the extent of `count` elements from `start` on. If they are one block, it is then in
// `block`, which may be the buffer.
template <typename T>
Extent extent_of(const T* x, int64_t start, int64_t count, const Channels& channels, float* buffer,
                 const float*& block) {
  Extent extent;
  for (int64_t t = 0; t < count; t += kBlock) {
    const int64_t n = std::min(kBlock, count - t);
    block = as_tiles(x, start + t, n, channels, buffer);
    for (int64_t i = 0; i < n; i += kTile) extent.add(block + i);
  }
  return extent;
}

template <typename T>
void pack_group(const T* x, int64_t start, int64_t count, const Channels& channels, uint64_t seed,
                int64_t bits, uint64_t* words, BFloat16* stats) {
  float buffer[kBlock];
  const float* block = buffer;
  const Extent extent = extent_of(x, start, count, channels, buffer, block);
  const Stats s = stats_of(extent, top_code(static_cast<int>(bits)));
  stats[0] = BFloat16(s.low);
  stats[1] = BFloat16(s.step);
  if (!(s.step > 0.f)) {
    std::fill_n(words, tiles_of(count) * bits, uint64_t{0});
    if (s.step == 0.f) {
      const double value = channels ? static_cast<double>(block[0]) : static_cast<double>(x[start]);
      std::memcpy(words, &value, sizeof value);
    }
    return;
  }
  const Coder& coder = coder_of(bits);
  for (int64_t t = 0; t < count; t += kBlock) {
    const int64_t n = std::min(kBlock, count - t);
    if (count > kBlock) block = as_tiles(x, start + t, n, channels, buffer);
    coder.encode(block, tiles_of(n), s, static_cast<uint64_t>(start + t), seed,
                 words + t / kTile * bits);
  }
  if (const int64_t used = count % kTile) {
    uint64_t* last = words + count / kTile * bits;
    for (int64_t p = 0; p < bits; ++p) last[p] &= (uint64_t{1} << used) - 1;
  }
}

// The elements of exact groups: rows of `width`, by ascending group.
template <typename T>
struct ExactGroups {
  const int64_t* groups = nullptr;
  const T* values = nullptr;
  int64_t count = 0;
  int64_t width = 0;

  // Returns the elements of a group, or null if it is not exact.
  const T* find(int64_t group, Stats stats) const {
    if (!std::isnan(stats.step)) return nullptr;
    const int64_t* at = std::lower_bound(groups, groups + count, group);
    if (at == groups + count || *at != group) return nullptr;
    return values + (at - groups) * width;
  }
};

// Decodes `count` elements of a tensor from `start` on.
template <typename T>
void unpack_span(const uint64_t* words, const BFloat16* pairs, int64_t start, int64_t count,
                 const Layout& layout, int64_t group_size, const Decoder<T>& decode,
                 const ExactGroups<T>& exact, T* x) {
  float buffer[kBlock];
  Layout::Group group = layout[start / group_size];
  for (int64_t at = start, end; at < start + count; x += end - at, at = end) {
    if (at == (group.number + 1) * group_size) group = layout.after(group);
    const int64_t g = group.number, first = at / kTile * kTile;
    end = std::min({start + count, (g + 1) * group_size, first + kBlock});
    const Stats s = {static_cast<float>(pairs[2 * g]), static_cast<float>(pairs[2 * g + 1])};
    if (const T* own = exact.find(g, s)) {
      std::copy_n(own + (at - g * group_size), end - at, x);
      continue;
    }
    if (s.step == 0.f) {
      double value;
      std::memcpy(&value, words + group.word, sizeof value);
      std::fill_n(x, end - at, static_cast<T>(value));
      continue;
    }
    const int64_t bits = group.bits;
    const uint64_t* tiles = words + group.word + (first - g * group_size) / kTile * bits;
    if constexpr (std::is_same_v<T, float>) {
      if (at == first && (end - at) % kTile == 0) {
        decode(tiles, bits, (end - at) / kTile, s, first, x);
        continue;
      }
    }
    decode(tiles, bits, tiles_of(end - first), s, first, buffer);
    int64_t i = at;
    if constexpr (!std::is_same_v<T, float>) {
      const int64_t whole = at == first ? first + (end - first) / kTile * kTile : at;
      for (; i < whole; i += kTile) narrow_tile(buffer + (i - first), x + (i - at));
    }
    for (; i < end; ++i) x[i - at] = static_cast<T>(buffer[i - first]);
  }
}

int64_t groups_per_task(int64_t group_size) {
  return std::max<int64_t>(1, (int64_t{1} << 15) / group_size);
}

void check(int64_t bits, int64_t group_size) {
  GACT_CHECK_VALUE(1 <= bits && bits <= kMostBits, "Expected bits from 1 to ", kMostBits, " (got ",
                   bits, ")");
  GACT_CHECK_VALUE(group_size > 0 && group_size % kTile == 0,
                   "Expected group_size to be a positive multiple of ", kTile, " (got ", group_size,
                   ")");
}

Layout checked_layout(const Tensor& codes, const Tensor& stats, int64_t n, int64_t bits,
                      int64_t group_size, const std::optional<Tensor>& widths) {
  if (widths) {
    check_dim("codes", codes, 1);
    check_tensor("codes", codes, ScalarType::Long, {codes.size(0)});
  } else {
    check_tensor("codes", codes, ScalarType::Long, {tiles_of(n), bits});
  }
  check_tensor("stats", stats, ScalarType::BFloat16, {ceil_div(n, group_size), 2});
  return {n, bits, group_size, widths, codes.numel()};
}

template <typename T>
ExactGroups<T> exact_groups_of(const std::optional<Tensor>& groups,
                               const std::optional<Tensor>& values, int64_t n, int64_t group_size) {
  GACT_CHECK_VALUE(groups.has_value() == values.has_value(),
                   "Expected groups and values, or none of both (got one)");
  if (!groups) return {};
  check_dim("groups", *groups, 1);
  const int64_t count = groups->size(0), width = std::min(group_size, n);
  check_tensor("groups", *groups, ScalarType::Long, {count});
  check_tensor("values", *values, c10::CppTypeToScalarType<T>::value, {count, width});
  return {const_data<int64_t>(*groups), const_data<T>(*values), count, width};
}

std::tuple<Tensor, Tensor> pack(const Tensor& input, int64_t bits, int64_t group_size, int64_t seed,
                                const std::optional<Tensor>& widths, int64_t num_words,
                                const std::optional<Tensor>& normalizing, int64_t inner) {
  check(bits, group_size);
  check_readable("x", input);
  check_coded("x", input.scalar_type());
  const Tensor x = as_contiguous(input);
  const int64_t n = x.numel();
  const int64_t groups = ceil_div(n, group_size);
  const Layout layout(n, bits, group_size, widths, num_words);
  const Channels channels(normalizing, inner, n);
  Tensor codes =
      widths ? empty({num_words}, ScalarType::Long) : empty({tiles_of(n), bits}, ScalarType::Long);
  Tensor stats = empty({groups, 2}, ScalarType::BFloat16);
  advise_huge_pages(codes);
  auto* words = reinterpret_cast<uint64_t*>(mutable_data<int64_t>(codes));
  auto* pairs = mutable_data<BFloat16>(stats);
  with_coded(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    const scalar_t* from = const_data<scalar_t>(x);
    for_each_range(groups, groups_per_task(group_size), [&](int64_t begin, int64_t end) {
      Layout::Group group = layout[begin];
      for (int64_t g = begin; g < end; ++g) {
        if (g > begin) group = layout.after(group);
        const int64_t start = g * group_size;
        pack_group(from, start, std::min(group_size, n - start), channels,
                   static_cast<uint64_t>(seed), group.bits, words + group.word, pairs + 2 * g);
      }
    });
  });
  return {codes, stats};
}

// Returns the maximum minus the minimum of each whole group; NaN where that is not finite.
Tensor group_ranges(const Tensor& input, int64_t group_size,
                    const std::optional<Tensor>& normalizing, int64_t inner) {
  check(1, group_size);
  check_readable("x", input);
  check_coded("x", input.scalar_type());
  const Tensor x = as_contiguous(input);
  const Channels channels(normalizing, inner, x.numel());
  const int64_t whole = x.numel() / group_size;
  Tensor ranges = empty({whole}, ScalarType::Float);
  auto* to = mutable_data<float>(ranges);
  with_coded(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    const scalar_t* from = const_data<scalar_t>(x);
    for_each_range(whole, groups_per_task(group_size), [&](int64_t begin, int64_t end) {
      float buffer[kBlock];
      const float* block = buffer;
      for (int64_t g = begin; g < end; ++g) {
        const Extent extent = extent_of(from, g * group_size, group_size, channels, buffer, block);
        const float range = extent.max() - extent.min();
        to[g] = extent.finite() && std::isfinite(range) ? range
                                                        : std::numeric_limits<float>::quiet_NaN();
      }
    });
  });
  return ranges;
}

// Returns three times the mean of f (1 - f), weighted by the square of the step, where f is the
// fraction that rounding decides on: over all elements of about `count` groups.
Tensor decorrelated_weight(const Tensor& input, const Tensor& stats, int64_t group_size,
                           int64_t count, const std::optional<Tensor>& normalizing, int64_t inner) {
  check(1, group_size);
  check_readable("x", input);
  check_coded("x", input.scalar_type());
  const Tensor x = as_contiguous(input);
  const int64_t n = x.numel(), size = std::min(group_size, n);
  GACT_CHECK_VALUE(n > 0 && count > 0, "Expected elements and groups (got ", n, " and ", count,
                   ")");
  check_tensor("stats", stats, ScalarType::BFloat16, {ceil_div(n, group_size), 2});
  const Channels channels(normalizing, inner, n);
  const int64_t whole = n / size, stride = ceil_div(whole, count);
  const auto* pairs = const_data<BFloat16>(stats);
  double variances = 0, squares = 0;
  with_coded(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    const scalar_t* from = const_data<scalar_t>(x);
    float buffer[kBlock];
    for (int64_t g = 0; g < whole; g += stride) {
      const float low = pairs[2 * g], step = pairs[2 * g + 1];
      if (!(step > 0.f)) continue;  // equal elements, or an exact group
      double sum = 0;
      for (int64_t t = 0; t < size; t += kBlock) {
        const int64_t own = std::min(kBlock, size - t);
        const float* block = as_tiles(from, g * size + t, own, channels, buffer);
        for (int64_t i = 0; i < own; ++i) {
          const float level = (block[i] - low) / step, f = level - std::floor(level);
          sum += f * (1.f - f);
        }
      }
      const double square = static_cast<double>(step) * step;
      variances += sum / static_cast<double>(size) * square;
      squares += square;
    }
  });
  Tensor weight = empty({1}, ScalarType::Float);
  *mutable_data<float>(weight) = squares > 0 ? static_cast<float>(3 * variances / squares) : 0.f;
  return weight;
}

// Returns the groups without stats and their elements; the last group is padded with its last
// element.
std::tuple<Tensor, Tensor> exact_groups(const Tensor& input, const Tensor& stats,
                                        int64_t group_size) {
  check(1, group_size);
  check_readable("x", input);
  check_coded("x", input.scalar_type());
  const int64_t n = input.numel(), width = std::min(group_size, n);
  check_tensor("stats", stats, ScalarType::BFloat16, {ceil_div(n, group_size), 2});
  const auto* pairs = const_data<BFloat16>(stats);
  std::vector<int64_t> without;
  for (int64_t g = 0; g < stats.size(0); ++g) {
    if (std::isnan(static_cast<float>(pairs[2 * g + 1]))) without.push_back(g);
  }
  const auto count = static_cast<int64_t>(without.size());
  Tensor groups = empty({count}, ScalarType::Long);
  Tensor values = empty({count, width}, input.scalar_type());
  if (without.empty()) return {groups, values};
  std::copy(without.begin(), without.end(), mutable_data<int64_t>(groups));
  const Tensor x = as_contiguous(input);
  const auto size = static_cast<int64_t>(x.element_size());
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(values.mutable_data_ptr());
  for (const int64_t g : without) {
    const int64_t start = g * group_size, own = std::min(width, n - start);
    std::memcpy(to, from + start * size, own * size);
    for (int64_t i = own; i < width; ++i) std::memcpy(to + i * size, from + (n - 1) * size, size);
    to += width * size;
  }
  return {groups, values};
}

constexpr int64_t kMixed = 16 * kBlock;  // elements of two decodings, which stay in the cache

// Moves elements by a share of the way to others.
template <typename T>
void mix(const T* others, T share, int64_t count, T* x) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    // In exact groups, both are the elements themselves, which may be infinite.
    const T way = others[i] == x[i] ? T{0} : others[i] - x[i];
    x[i] = x[i] + way * share;
  }
}

float checked_weight(const Tensor& weight, std::optional<int64_t> seed, ScalarType dtype) {
  check_tensor("weight", weight, ScalarType::Float, {1});
  GACT_CHECK_VALUE(seed.has_value(), "Expected a seed with a weight (got none)");
  GACT_CHECK_VALUE(dtype == ScalarType::Float, "Expected a dtype of ", ScalarType::Float,
                   " with a weight (got ", dtype, ")");
  return *const_data<float>(weight);
}

Tensor unpack(const Tensor& codes, const Tensor& stats, const std::vector<int64_t>& shape,
              int64_t bits, int64_t group_size, ScalarType dtype,
              const std::optional<Tensor>& kept_groups, const std::optional<Tensor>& kept_values,
              std::optional<int64_t> seed, const std::optional<Tensor>& widths,
              const std::optional<Tensor>& weight) {
  check(bits, group_size);
  check_coded("a dtype", dtype);
  const float share = weight ? checked_weight(*weight, seed, dtype) : 0.f;
  const int64_t n = checked_numel(shape);
  const int64_t groups = ceil_div(n, group_size);
  const Layout layout = checked_layout(codes, stats, n, bits, group_size, widths);
  Tensor x = empty(shape, dtype);
  advise_huge_pages(x);
  const auto* words = reinterpret_cast<const uint64_t*>(const_data<int64_t>(codes));
  const auto* pairs = const_data<BFloat16>(stats);
  with_coded(dtype, [&](auto real) {
    using scalar_t = decltype(real);
    const auto exact = exact_groups_of<scalar_t>(kept_groups, kept_values, n, group_size);
    const Decoder<scalar_t> decode(weight ? std::nullopt : seed), other(seed);
    scalar_t* to = mutable_data<scalar_t>(x);
    for_each_range(groups, groups_per_task(group_size), [&](int64_t begin, int64_t end) {
      const int64_t start = begin * group_size;
      const int64_t count = std::min((end - begin) * group_size, n - start);
      if (!weight) {
        unpack_span(words, pairs, start, count, layout, group_size, decode, exact, to + start);
        return;
      }
      scalar_t second[kMixed];
      for (int64_t at = start; at < start + count; at += kMixed) {
        const int64_t n = std::min(kMixed, start + count - at);
        unpack_span(words, pairs, at, n, layout, group_size, decode, exact, to + at);
        unpack_span(words, pairs, at, n, layout, group_size, other, exact, second);
        mix(second, static_cast<scalar_t>(share), n, to + at);
      }
    });
  });
  return x;
}

constexpr int64_t kAhead = 6;  // rows

Tensor unpack_rows(const Tensor& codes, const Tensor& stats, const Tensor& rows, int64_t numel,
                   int64_t width, int64_t bits, int64_t group_size, ScalarType dtype,
                   const std::optional<Tensor>& kept_groups,
                   const std::optional<Tensor>& kept_values, std::optional<int64_t> seed,
                   const std::optional<Tensor>& widths) {
  check(bits, group_size);
  check_coded("a dtype", dtype);
  GACT_CHECK_VALUE(numel >= 0, "Expected numel from 0 on (got ", numel, ")");
  GACT_CHECK_VALUE(width > 0, "Expected rows of 1 element or more (got ", width, ")");
  const Layout layout = checked_layout(codes, stats, numel, bits, group_size, widths);
  check_readable("rows", rows);
  GACT_CHECK_VALUE(rows.scalar_type() == ScalarType::Long, "Expected rows of ", ScalarType::Long,
                   " (got ", rows.scalar_type(), ")");
  GACT_CHECK_VALUE(rows.dim() == 1, "Expected rows of 1 dimension(s) (got ", text_of(rows.sizes()),
                   ")");
  const Tensor wanted = as_contiguous(rows);
  const int64_t* numbers = const_data<int64_t>(wanted);
  const int64_t last = numel / width - 1;
  // Before an allocation of that size, and before a product of row numbers could overflow.
  for (int64_t i = 0; i < wanted.size(0); ++i) {
    GACT_CHECK_INDEX(0 <= numbers[i] && numbers[i] <= last, "Expected rows from 0 to ", last,
                     " (got ", numbers[i], ")");
  }
  Tensor x = empty({wanted.size(0), width}, dtype);
  advise_huge_pages(x);
  const auto* words = reinterpret_cast<const uint64_t*>(const_data<int64_t>(codes));
  const auto* pairs = const_data<BFloat16>(stats);
  const auto prefetch = [&](int64_t start, int64_t count) {
    constexpr int64_t kLine = 64 / sizeof(uint64_t);
    const Layout::Group group = layout[start / group_size];
    const int64_t bits = group.bits;
    const uint64_t* first = words + group.word + (start - group.number * group_size) / kTile * bits;
    for (int64_t i = 0; i < (count / kTile + 1) * bits; i += kLine) __builtin_prefetch(first + i);
    __builtin_prefetch(pairs + 2 * group.number);
  };
  with_coded(dtype, [&](auto real) {
    using scalar_t = decltype(real);
    const auto exact = exact_groups_of<scalar_t>(kept_groups, kept_values, numel, group_size);
    const Decoder<scalar_t> decode(seed);
    scalar_t* to = mutable_data<scalar_t>(x);
    const int64_t task = std::max<int64_t>(1, (int64_t{1} << 15) / width);
    for_each_range(wanted.size(0), task, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) prefetch(numbers[i + kAhead] * width, width);
        unpack_span(words, pairs, numbers[i] * width, width, layout, group_size, decode, exact,
                    to + i * width);
      }
    });
  });
  return x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("pack", TORCH_BOX(&pack));
  library.impl("group_ranges", TORCH_BOX(&group_ranges));
  library.impl("decorrelated_weight", TORCH_BOX(&decorrelated_weight));
  library.impl("exact_groups", TORCH_BOX(&exact_groups));
  library.impl("unpack", TORCH_BOX(&unpack));
  library.impl("unpack_rows", TORCH_BOX(&unpack_rows));
}

}  // namespace gact_graph
