// A tile with AVX-512: see lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "tensor.h"
#include "tile.h"

namespace gact_graph {

constexpr int kLanes = 16;

inline __m512i set1(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }

inline __m512 read(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 read(const double* p) {
  const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(p));
  const __m256 high = _mm512_cvtpd_ps(_mm512_loadu_pd(p + 8));
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
inline __m512 read(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 read(const BFloat16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

inline void write(double* p, __m512 x) {
  _mm512_storeu_pd(p, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
  _mm512_storeu_pd(p + 8, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}
inline void write(Half* p, __m512 x) {
  const __m256i raw = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), raw);
}
// NaN must be quiet and without a payload, as decode makes it, to survive the addition.
inline void write(BFloat16* p, __m512 x) {
  __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), set1(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, set1(0x7FFF)));
  const __m256i raw = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), raw);
}

template <typename T>
inline void widen_tile(const T* from, float* to) {
  for (int i = 0; i < kTile; i += kLanes) _mm512_storeu_ps(to + i, read(from + i));
}
template <typename T>
inline void narrow_tile(const float* from, T* to) {
  for (int i = 0; i < kTile; i += kLanes) write(to + i, read(from + i));
}

// The minimum and maximum of the added tiles, and whether all elements are finite.
class Extent {
 public:
  void add(const float* tile) {
    for (int i = 0; i < kTile; i += kLanes) {
      const __m512 x = read(tile + i);
      low_ = _mm512_min_ps(low_, x);
      high_ = _mm512_max_ps(high_, x);
      // Zero times Inf or NaN is NaN, which a sum keeps: cheaper than a test of each element.
      poison_ = _mm512_fmadd_ps(x, _mm512_setzero_ps(), poison_);
    }
  }
  bool finite() const { return _mm512_cmp_ps_mask(poison_, poison_, _CMP_UNORD_Q) == 0; }
  float min() const { return _mm512_reduce_min_ps(low_); }
  float max() const { return _mm512_reduce_max_ps(high_); }

 private:
  __m512 low_ = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  __m512 high_ = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 poison_ = _mm512_setzero_ps();
};

// noise_hash of noise.h for 16 counters.
inline __m512i noise_hash(__m512i counter, NoiseKey key) {
  __m512i h = _mm512_xor_si512(counter, set1(key.first));
  h = _mm512_mullo_epi32(h, set1(0x9E3779B1u));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
  h = _mm512_add_epi32(h, set1(key.second));
  h = _mm512_mullo_epi32(h, set1(0x85EBCA77u));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 13));
  h = _mm512_mullo_epi32(h, set1(0xC2B2AE3Du));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
  return _mm512_add_epi16(h, set1(key.shift));
}

// Codes of at most 8 bits become one vector of 64 bytes, so that one test makes a whole word.
template <int kBits>
inline void encode_tile(const float* x, float low, float scale, uint32_t index, NoiseKey key,
                        uint64_t* words) {
  constexpr int kFraction = fraction_bits(kBits);
  const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i code[kTile / kLanes];
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    const __m512i h = noise_hash(_mm512_add_epi32(ramp, set1(index + 32 * pair)), key);
    const __m512i noise[2] = {_mm512_srli_epi32(_mm512_and_si512(h, set1(0xFFFF)), 16 - kFraction),
                              _mm512_srli_epi32(h, 32 - kFraction)};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * pair + half;
      const __m512 shifted = _mm512_sub_ps(read(x + i * kLanes), _mm512_set1_ps(low));
      const __m512i fine = _mm512_cvtps_epi32(_mm512_mul_ps(shifted, _mm512_set1_ps(scale)));
      code[i] = _mm512_srli_epi32(_mm512_add_epi32(fine, noise[half]), kFraction);
    }
  }
  // Packing works within quarters of 128 bits: the permutation puts the elements back in order.
  // It saturates, so that a code that was rounded up to 2^8 or 2^16 needs no clamp of its own.
  const __m512i low_half = _mm512_packus_epi32(code[0], code[1]);
  const __m512i high_half = _mm512_packus_epi32(code[2], code[3]);
  if constexpr (kBits <= 8) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i bytes = _mm512_packus_epi16(low_half, high_half);
    bytes = _mm512_permutexvar_epi32(order, bytes);
    bytes = _mm512_min_epu8(bytes, _mm512_set1_epi8(static_cast<char>(top_code(kBits))));
#pragma GCC unroll 8
    for (int p = 0; p < kBits; ++p) {
      words[p] = _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(static_cast<char>(1 << p)));
    }
  } else {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i top = _mm512_set1_epi16(static_cast<short>(top_code(kBits)));
    const __m512i first = _mm512_min_epu16(_mm512_permutexvar_epi64(order, low_half), top);
    const __m512i second = _mm512_min_epu16(_mm512_permutexvar_epi64(order, high_half), top);
#pragma GCC unroll 16
    for (int p = 0; p < kBits; ++p) {
      const __m512i bit = _mm512_set1_epi16(static_cast<short>(1 << p));
      const uint64_t upper = _mm512_test_epi16_mask(second, bit);
      words[p] = upper << 32 | _mm512_test_epi16_mask(first, bit);
    }
  }
}

// Clamps to the range of the type: the step is rounded up, and must not turn a finite value into
// infinity. The operand order keeps NaN.
inline __m512 decode(__m512 level, float low, float step, float limit) {
  __m512 x = _mm512_mul_ps(level, _mm512_set1_ps(step));
  x = _mm512_add_ps(x, _mm512_set1_ps(low));
  x = _mm512_min_ps(_mm512_set1_ps(limit), x);
  return _mm512_max_ps(_mm512_set1_ps(-limit), x);
}

// 32 elements, of which those of the two vectors of codes share a hash each.
template <int kBits, bool kDecorrelated>
inline void decode_pair(__m512i first, __m512i second, float low, float step, float limit,
                        uint32_t index, NoiseKey key, float* x) {
  __m512 levels[2] = {_mm512_cvtepi32_ps(first), _mm512_cvtepi32_ps(second)};
  if constexpr (kDecorrelated) {
    constexpr int kFraction = fraction_bits(kBits);
    const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i h = noise_hash(_mm512_add_epi32(ramp, set1(index)), key);
    const __m512i noise[2] = {_mm512_srli_epi32(_mm512_and_si512(h, set1(0xFFFF)), 16 - kFraction),
                              _mm512_srli_epi32(h, 32 - kFraction)};
    const __m512i codes[2] = {first, second};
    for (int i = 0; i < 2; ++i) {
      const __m512i most =
          _mm512_add_epi32(_mm512_slli_epi32(codes[i], kFraction), set1((1u << kFraction) - 1));
      const __m512i grains = _mm512_sub_epi32(most, _mm512_slli_epi32(noise[i], 1));
      levels[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(grains), _mm512_set1_ps(grain(kBits)));
    }
  }
  _mm512_storeu_ps(x, decode(levels[0], low, step, limit));
  _mm512_storeu_ps(x + kLanes, decode(levels[1], low, step, limit));
}

// The index and the key are used by the decorrelated decoding.
template <int kBits, bool kDecorrelated>
inline void decode_tile(const uint64_t* words, float low, float step, float limit, uint32_t index,
                        NoiseKey key, float* x) {
  if constexpr (kBits <= 8) {
    __m512i bytes = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int p = 0; p < kBits; ++p) {
      const __m512i bit = _mm512_set1_epi8(static_cast<char>(1 << p));
      bytes = _mm512_or_si512(bytes, _mm512_maskz_mov_epi8(words[p], bit));
    }
    const __m128i quarter[4] = {_mm512_castsi512_si128(bytes), _mm512_extracti32x4_epi32(bytes, 1),
                                _mm512_extracti32x4_epi32(bytes, 2),
                                _mm512_extracti32x4_epi32(bytes, 3)};
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const __m512i first = _mm512_cvtepu8_epi32(quarter[i]);
      const __m512i second = _mm512_cvtepu8_epi32(quarter[i + 1]);
      decode_pair<kBits, kDecorrelated>(first, second, low, step, limit, index + i * kLanes, key,
                                        x + i * kLanes);
    }
  } else {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512i shorts = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int p = 0; p < kBits; ++p) {
        const __m512i bit = _mm512_set1_epi16(static_cast<short>(1 << p));
        const auto mask = static_cast<__mmask32>(words[p] >> (32 * half));
        shorts = _mm512_or_si512(shorts, _mm512_maskz_mov_epi16(mask, bit));
      }
      const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(shorts));
      const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(shorts, 1));
      const int at = 2 * half * kLanes;
      decode_pair<kBits, kDecorrelated>(first, second, low, step, limit, index + at, key, x + at);
    }
  }
}

}  // namespace gact_graph
