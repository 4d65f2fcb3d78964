// Sixteen floats at a time: the little that quantize.cpp needs, with AVX-512 or as plain loops.
// Both give the same bits: single IEEE operations, rounding to nearest even, nothing contracted.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define GACT_AVX512 1
#include <immintrin.h>
#else
#define GACT_AVX512 0
#endif

#include "../noise.h"

namespace gact_graph {

constexpr int kLanes = 16;

#if GACT_AVX512

using Floats = __m512;
using Codes = __m512i;

inline Floats read(const float* p) { return _mm512_loadu_ps(p); }
inline Floats read(const double* p) {
  const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(p));
  const __m256 high = _mm512_cvtpd_ps(_mm512_loadu_pd(p + 8));
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
inline Floats read(const c10::Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats read(const c10::BFloat16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// Clamps to the range of the type: a step that was rounded up must not turn a finite value into
// infinity. The operand order lets NaN through.
inline Floats clamp(Floats x, float limit) {
  x = _mm512_min_ps(_mm512_set1_ps(limit), x);
  return _mm512_max_ps(_mm512_set1_ps(-limit), x);
}
inline void write(float* p, Floats x) {
  _mm512_storeu_ps(p, clamp(x, std::numeric_limits<float>::max()));
}
inline void write(double* p, Floats x) {
  x = clamp(x, std::numeric_limits<float>::max());
  _mm512_storeu_pd(p, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
  _mm512_storeu_pd(p + 8, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}
inline void write(c10::Half* p, Floats x) {
  const __m256i raw = _mm512_cvtps_ph(clamp(x, 65504.f), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), raw);
}
inline void write(c10::BFloat16* p, Floats x) {
  // 0x7F7F0000, the largest bfloat16.
  __m512i bits = _mm512_castps_si512(clamp(x, 3.3895313892515355e38f));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m256i raw = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), raw);
}

struct Extent {
  Floats low = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  Floats high = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512i magnitude = _mm512_setzero_si512();

  void add(Floats x) {
    low = _mm512_min_ps(low, x);
    high = _mm512_max_ps(high, x);
    const __m512i bits = _mm512_castps_si512(x);
    magnitude = _mm512_max_epu32(magnitude, _mm512_slli_epi32(bits, 1));
  }
  // Shifting the sign out leaves 0xFF000000 and more for Inf and NaN.
  bool finite() const { return _mm512_reduce_max_epu32(magnitude) < 0xFF000000u; }
  float min() const { return _mm512_reduce_min_ps(low); }
  float max() const { return _mm512_reduce_max_ps(high); }
};

// 32 hashes' worth of noise for two consecutive vectors, as noise16 in noise.h defines it.
struct NoisePair {
  Codes first;
  Codes second;
  NoisePair(uint32_t index, NoiseKey key) {
    const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i h = _mm512_add_epi32(ramp, _mm512_set1_epi32(static_cast<int>(index)));
    h = _mm512_xor_si512(h, _mm512_set1_epi32(static_cast<int>(key.first)));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int>(0x9E3779B1u)));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
    h = _mm512_add_epi32(h, _mm512_set1_epi32(static_cast<int>(key.second)));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int>(0x85EBCA77u)));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 13));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int>(0xC2B2AE3Du)));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
    first = _mm512_and_si512(h, _mm512_set1_epi32(0xFFFF));
    second = _mm512_srli_epi32(h, 16);
  }
};

// kFraction bits of noise below the code: see Width in quantize.cpp.
template <int kFraction>
inline Codes encode(Floats x, float low, float scale, Codes noise, int top) {
  const Floats y = _mm512_mul_ps(_mm512_sub_ps(x, _mm512_set1_ps(low)), _mm512_set1_ps(scale));
  const Codes fine = _mm512_add_epi32(_mm512_cvtps_epi32(y), _mm512_srli_epi32(noise, 16 - kFraction));
  return _mm512_min_epi32(_mm512_srli_epi32(fine, kFraction), _mm512_set1_epi32(top));
}

template <int kBits>
inline void put_planes(Codes code, int lane, uint64_t* words) {
#pragma GCC unroll 16
  for (int p = 0; p < kBits; ++p) {
    const uint64_t mask = _mm512_test_epi32_mask(code, _mm512_set1_epi32(1 << p));
    words[p] |= mask << lane;
  }
}
template <int kBits>
inline Codes get_planes(const uint64_t* words, int lane) {
  Codes code = _mm512_setzero_si512();
#pragma GCC unroll 16
  for (int p = 0; p < kBits; ++p) {
    const __mmask16 mask = static_cast<__mmask16>(words[p] >> lane);
    code = _mm512_mask_or_epi32(code, mask, code, _mm512_set1_epi32(1 << p));
  }
  return code;
}
inline Floats decode(Codes code, float low, float step) {
  const Floats x = _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(step));
  return _mm512_add_ps(x, _mm512_set1_ps(low));
}

#else  // plain loops, which the compiler may vectorise for what it targets

struct Floats {
  float lane[kLanes];
};
struct Codes {
  uint32_t lane[kLanes];
};

template <typename T>
inline Floats read(const T* p) {
  Floats x;
  for (int i = 0; i < kLanes; ++i) x.lane[i] = static_cast<float>(p[i]);
  return x;
}
// Clamps to the range of the type: a step that was rounded up must not turn a finite value into
// infinity. NaN fails both comparisons and stays.
inline float clamp(float x, float limit) { return x > limit ? limit : (x < -limit ? -limit : x); }
template <typename T>
inline void write(T* p, const Floats& x) {
  const float limit = sizeof(T) > 2 ? std::numeric_limits<float>::max()
                                    : static_cast<float>(std::numeric_limits<T>::max());
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<T>(clamp(x.lane[i], limit));
}

struct Extent {
  float low = std::numeric_limits<float>::infinity();
  float high = -std::numeric_limits<float>::infinity();
  bool all_finite = true;

  void add(const Floats& x) {
    for (int i = 0; i < kLanes; ++i) {
      low = x.lane[i] < low ? x.lane[i] : low;
      high = x.lane[i] > high ? x.lane[i] : high;
      all_finite &= std::isfinite(x.lane[i]);
    }
  }
  bool finite() const { return all_finite; }
  float min() const { return low; }
  float max() const { return high; }
};

struct NoisePair {
  Codes first;
  Codes second;
  NoisePair(uint32_t index, NoiseKey key) {
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t h = noise_hash(index + i, key);
      first.lane[i] = h & 0xFFFFu;
      second.lane[i] = h >> 16;
    }
  }
};

template <int kFraction>
inline Codes encode(const Floats& x, float low, float scale, const Codes& noise, int top) {
  Codes code;
  for (int i = 0; i < kLanes; ++i) {
    const float y = (x.lane[i] - low) * scale;
    const int32_t fine = static_cast<int32_t>(std::nearbyintf(y)) +
                         static_cast<int32_t>(noise.lane[i] >> (16 - kFraction));
    const int32_t whole = fine >> kFraction;
    code.lane[i] = static_cast<uint32_t>(whole < top ? whole : top);
  }
  return code;
}

template <int kBits>
inline void put_planes(const Codes& code, int lane, uint64_t* words) {
  for (int p = 0; p < kBits; ++p) {
    uint64_t mask = 0;
    for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint64_t>((code.lane[i] >> p) & 1u) << i;
    words[p] |= mask << lane;
  }
}
template <int kBits>
inline Codes get_planes(const uint64_t* words, int lane) {
  Codes code = {};
  for (int p = 0; p < kBits; ++p) {
    const uint32_t mask = static_cast<uint32_t>(words[p] >> lane);
    for (int i = 0; i < kLanes; ++i) code.lane[i] |= ((mask >> i) & 1u) << p;
  }
  return code;
}
inline Floats decode(const Codes& code, float low, float step) {
  Floats x;
  for (int i = 0; i < kLanes; ++i) x.lane[i] = static_cast<float>(code.lane[i]) * step + low;
  return x;
}

#endif

}  // namespace gact_graph
