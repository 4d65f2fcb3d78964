// Calls of templates for the dtype of a tensor: with_real(dtype, work) returns work(zero), where
// zero has the C++ type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "errors.h"
#include "tensor.h"

namespace gact_graph {

// For float32 and float64.
template <typename Work>
auto with_real(ScalarType dtype, const Work& work) {
  GACT_CHECK_VALUE(dtype == ScalarType::Float || dtype == ScalarType::Double,
                   "Expected a tensor of float32 or float64 (got ", dtype, ")");
  return dtype == ScalarType::Float ? work(float{}) : work(double{});
}

inline bool is_coded(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

inline void check_coded(const char* name, ScalarType dtype) {
  GACT_CHECK_VALUE(is_coded(dtype), "Expected ", name,
                   " of float16, bfloat16, float32 or float64 (got ", dtype, ")");
}

// For the dtypes of check_coded.
template <typename Work>
auto with_coded(ScalarType dtype, const Work& work) {
  switch (dtype) {
    case ScalarType::Half:
      return work(Half{});
    case ScalarType::BFloat16:
      return work(BFloat16{});
    default:
      return with_real(dtype, work);
  }
}

// For int32 and int64.
template <typename Work>
auto with_index(ScalarType dtype, const Work& work) {
  return dtype == ScalarType::Int ? work(int32_t{}) : work(int64_t{});
}

// For every dtype of real numbers.
template <typename Work>
auto with_any_real(ScalarType dtype, const Work& work) {
  switch (dtype) {
    case ScalarType::Bool:
      return work(bool{});
    case ScalarType::Byte:
      return work(uint8_t{});
    case ScalarType::Char:
      return work(int8_t{});
    case ScalarType::UInt16:
      return work(uint16_t{});
    case ScalarType::Short:
      return work(int16_t{});
    case ScalarType::UInt32:
      return work(uint32_t{});
    case ScalarType::Int:
      return work(int32_t{});
    case ScalarType::UInt64:
      return work(uint64_t{});
    case ScalarType::Long:
      return work(int64_t{});
    case ScalarType::Float8_e5m2:
      return work(c10::Float8_e5m2{});
    case ScalarType::Float8_e4m3fn:
      return work(c10::Float8_e4m3fn{});
    case ScalarType::Float8_e5m2fnuz:
      return work(c10::Float8_e5m2fnuz{});
    case ScalarType::Float8_e4m3fnuz:
      return work(c10::Float8_e4m3fnuz{});
    default:
      return with_coded(dtype, work);
  }
}

// Converts a number as torch does.
template <typename T>
T converted(double x) {
  if constexpr (std::is_same_v<T, bool>) {
    return x != 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<int64_t>(x));
  } else if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return static_cast<T>(static_cast<float>(x));
  }
}

inline bool is_complex(ScalarType dtype) {
  return dtype == ScalarType::ComplexHalf || dtype == ScalarType::ComplexFloat ||
         dtype == ScalarType::ComplexDouble;
}

inline bool is_floating(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2fnuz:
    case ScalarType::Float8_e4m3fnuz:
      return true;
    default:
      return is_coded(dtype);
  }
}

}  // namespace gact_graph
