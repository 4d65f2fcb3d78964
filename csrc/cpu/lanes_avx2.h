// A tile with AVX2, its codes in two vectors of 32 bytes: see lanes.h.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "convert.h"
#include "tile.h"

namespace gact_graph {

constexpr int kLanes = 8;
constexpr int kHalf = kTile / 2;

inline __m256i set1(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline __m256i ramp_from(uint32_t first) {
  return _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), set1(first));
}

// The minimum and maximum of the added tiles, and whether all elements are finite.
class Extent {
 public:
  void add(const float* tile) {
    for (int i = 0; i < kTile; i += kLanes) {
      const __m256 x = _mm256_loadu_ps(tile + i);
      low_ = _mm256_min_ps(low_, x);
      high_ = _mm256_max_ps(high_, x);
      // Zero times Inf or NaN is NaN, which a sum keeps: cheaper than a test of each element.
      poison_ = _mm256_add_ps(_mm256_mul_ps(x, _mm256_setzero_ps()), poison_);
    }
  }
  bool finite() const {
    return _mm256_movemask_ps(_mm256_cmp_ps(poison_, poison_, _CMP_UNORD_Q)) == 0;
  }
  float min() const {
    float lanes[kLanes];
    _mm256_storeu_ps(lanes, low_);
    return *std::min_element(lanes, lanes + kLanes);
  }
  float max() const {
    float lanes[kLanes];
    _mm256_storeu_ps(lanes, high_);
    return *std::max_element(lanes, lanes + kLanes);
  }

 private:
  __m256 low_ = _mm256_set1_ps(std::numeric_limits<float>::infinity());
  __m256 high_ = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
  __m256 poison_ = _mm256_setzero_ps();
};

// noise_hash of noise.h for 8 counters.
inline __m256i noise_hash(__m256i counter, NoiseKey key) {
  __m256i h = _mm256_xor_si256(counter, set1(key.first));
  h = _mm256_mullo_epi32(h, set1(0x9E3779B1u));
  h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 15));
  h = _mm256_add_epi32(h, set1(key.second));
  h = _mm256_mullo_epi32(h, set1(0x85EBCA77u));
  h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 13));
  h = _mm256_mullo_epi32(h, set1(0xC2B2AE3Du));
  h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
  return _mm256_add_epi16(h, set1(key.shift));
}

// The noise of 32 consecutive elements, of which each hash serves two.
template <int kBits>
inline void noise_of(uint32_t index, NoiseKey key, __m256i noise[4]) {
  constexpr int kFraction = fraction_bits(kBits);
  for (int i = 0; i < 2; ++i) {
    const __m256i h = noise_hash(ramp_from(index + i * kLanes), key);
    noise[i] = _mm256_srli_epi32(_mm256_and_si256(h, set1(0xFFFF)), 16 - kFraction);
    noise[i + 2] = _mm256_srli_epi32(h, 32 - kFraction);
  }
}

// 32 numbers below 256 as bytes, in their order. Packing works within halves of 128 bits.
inline __m256i bytes_of(const __m256i numbers[4]) {
  const __m256i first = _mm256_packus_epi32(numbers[0], numbers[1]);
  const __m256i second = _mm256_packus_epi32(numbers[2], numbers[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
}

// 8 of 32 bytes as numbers.
inline __m256i numbers_of(__m256i bytes, int quarter) {
  const __m128i half =
      quarter < 2 ? _mm256_castsi256_si128(bytes) : _mm256_extracti128_si256(bytes, 1);
  return _mm256_cvtepu8_epi32(quarter % 2 == 0 ? half : _mm_srli_si128(half, 8));
}

template <int kBits>
inline void encode_tile(const float* x, float low, float scale, uint32_t index, NoiseKey key,
                        uint64_t* words) {
  constexpr int kFraction = fraction_bits(kBits), kLowBits = kBits < 8 ? kBits : 8;
  uint32_t planes[2][kBits];
  for (int half = 0; half < 2; ++half) {
    __m256i noise[4], low_bytes[4], high_bytes[4];
    noise_of<kBits>(index + half * kHalf, key, noise);
    for (int i = 0; i < 4; ++i) {
      const __m256 values = _mm256_loadu_ps(x + half * kHalf + i * kLanes);
      const __m256 shifted = _mm256_sub_ps(values, _mm256_set1_ps(low));
      const __m256i fine = _mm256_cvtps_epi32(_mm256_mul_ps(shifted, _mm256_set1_ps(scale)));
      __m256i code = _mm256_srli_epi32(_mm256_add_epi32(fine, noise[i]), kFraction);
      code = _mm256_min_epi32(code, set1(top_code(kBits)));
      low_bytes[i] = kBits <= 8 ? code : _mm256_and_si256(code, set1(0xFF));
      high_bytes[i] = _mm256_srli_epi32(code, 8);
    }
    // The shift brings a bit to the top of its byte, where the mask is taken.
    const __m256i bytes = bytes_of(low_bytes);
#pragma GCC unroll 8
    for (int p = 0; p < kLowBits; ++p) {
      planes[half][p] = _mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - p));
    }
    if constexpr (kBits > 8) {
      const __m256i upper = bytes_of(high_bytes);
#pragma GCC unroll 8
      for (int p = 8; p < kBits; ++p) {
        planes[half][p] = _mm256_movemask_epi8(_mm256_slli_epi16(upper, 15 - p));
      }
    }
  }
  for (int p = 0; p < kBits; ++p) {
    words[p] = static_cast<uint64_t>(planes[1][p]) << 32 | planes[0][p];
  }
}

// 32 bytes, each with all bits set if the mask has its bit.
inline __m256i bytes_where(uint32_t mask) {
  const __m256i places =
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(set1(mask), places), own);
  return _mm256_cmpeq_epi8(bits, own);
}

// Clamps to the range of the type: the step is rounded up, and must not turn a finite value into
// infinity. The operand order keeps NaN.
inline __m256 decode(__m256 level, float low, float step, float limit) {
  __m256 x = _mm256_mul_ps(level, _mm256_set1_ps(step));
  x = _mm256_add_ps(x, _mm256_set1_ps(low));
  x = _mm256_min_ps(_mm256_set1_ps(limit), x);
  return _mm256_max_ps(_mm256_set1_ps(-limit), x);
}

// The index and the key are used by the decorrelated decoding.
template <int kBits, bool kDecorrelated>
inline void decode_tile(const uint64_t* words, float low, float step, float limit, uint32_t index,
                        NoiseKey key, float* x) {
  constexpr int kFraction = fraction_bits(kBits);
  for (int half = 0; half < 2; ++half) {
    __m256i bytes = _mm256_setzero_si256(), upper = _mm256_setzero_si256();
#pragma GCC unroll 16
    for (int p = 0; p < kBits; ++p) {
      const auto mask = static_cast<uint32_t>(words[p] >> (32 * half));
      __m256i& to = p < 8 ? bytes : upper;
      const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << p % 8));
      to = _mm256_or_si256(to, _mm256_and_si256(bytes_where(mask), bit));
    }
    __m256i noise[4];
    if constexpr (kDecorrelated) noise_of<kBits>(index + half * kHalf, key, noise);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m256i code = numbers_of(bytes, i);
      if constexpr (kBits > 8) {
        code = _mm256_or_si256(code, _mm256_slli_epi32(numbers_of(upper, i), 8));
      }
      if constexpr (kDecorrelated) {
        const __m256i most =
            _mm256_add_epi32(_mm256_slli_epi32(code, kFraction), set1((1u << kFraction) - 1));
        code = _mm256_sub_epi32(most, _mm256_slli_epi32(noise[i], 1));
      }
      __m256 level = _mm256_cvtepi32_ps(code);
      if constexpr (kDecorrelated) level = _mm256_mul_ps(level, _mm256_set1_ps(grain(kBits)));
      _mm256_storeu_ps(x + half * kHalf + i * kLanes, decode(level, low, step, limit));
    }
  }
}

}  // namespace gact_graph
