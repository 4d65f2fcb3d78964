// The element types on the GPU, for NVRTC, without CUDA's headers.
#pragma once

#include "../noise.h"

namespace gact_graph {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Elements that one instruction loads or stores.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount <= 16 ? sizeof(T) * kCount : 16) Vector {
  T at[kCount];
};

#ifdef __CUDACC_RTC__
inline float half_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
inline uint16_t half_of(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

inline float to_float(float x) { return x; }
inline float to_float(double x) { return static_cast<float>(x); }
inline float to_float(Half x) { return half_to_float(x.bits); }
inline float to_float(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

inline double to_double(double x) { return x; }
template <typename T>
inline double to_double(T x) {
  return to_float(x);
}

constexpr float kFloatMax = 3.40282346638528859812e+38f;

// The largest number of an element type, and the conversion to it.
template <typename T>
struct Element {
  static constexpr float kMax = kFloatMax;
  static T of(double x) { return static_cast<T>(x); }
};
template <>
struct Element<Half> {
  static constexpr float kMax = 65504.f;
  static Half of(double x) { return {half_of(static_cast<float>(x))}; }
};
template <>
struct Element<BFloat16> {
  static constexpr float kMax = 3.38953138925153547590e+38f;
  // Rounds to nearest even. NaN must be quiet and without a payload, to survive the addition.
  static BFloat16 of(double x) {
    const uint32_t bits = __float_as_uint(static_cast<float>(x));
    return {static_cast<uint16_t>((bits + (bits >> 16 & 1) + 0x7FFF) >> 16)};
  }
};

// The conversion from float without double, for which a GPU has few units.
template <typename T>
inline T from_float(float x) {
  if constexpr (sizeof(T) == 2) {
    return Element<T>::of(x);
  } else {
    return static_cast<T>(x);
  }
}

}  // namespace gact_graph
