// The kernels of one source, GACT_SOURCE, with the names of GACT_NAMES. Compiled with
// -fsanitize=thread,alignment,bounds, whose calls memory.cpp receives.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "simt.h"

#define __global__
#define __launch_bounds__(...)
#define threadIdx simt::thread_index()
#define blockIdx simt::block_index()
#define blockDim simt::block_size()
#define gridDim simt::grid_size()

namespace {

template <typename To, typename From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Returns the value of another lane; `kind` must be the same in all lanes.
template <typename T>
T shuffled(unsigned mask, T value, int kind, int lane) {
  if (mask != 0xFFFFFFFFu) simt::fail("a shuffle of all lanes (got mask %x)", mask);
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof value);
  raw = simt::value_of_lane(raw, kind, lane);
  std::memcpy(&value, &raw, sizeof value);
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int far) {
  return shuffled(mask, value, far, simt::lane() ^ far);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return shuffled(mask, value, simt::kWarp + lane, lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int far) {
  const int lane = simt::lane() + far < simt::kWarp ? simt::lane() + far : simt::lane();
  return shuffled(mask, value, 2 * simt::kWarp + far, lane);
}

uint32_t __ballot_sync(unsigned mask, bool value) {
  if (mask != 0xFFFFFFFFu) simt::fail("a vote of all lanes (got mask %x)", mask);
  return simt::votes_of_warp(value);
}
bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }

int __popc(uint32_t x) { return __builtin_popcount(x); }
int __ffs(int x) { return __builtin_ffs(x); }

uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
int64_t __double_as_longlong(double x) { return same_bits<int64_t>(x); }
double __longlong_as_double(int64_t x) { return same_bits<double>(x); }
int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
[[noreturn]] void __trap() { simt::fail("no trap (got one)"); }
using simt::half_of, simt::half_to_float;
using std::fmaf, std::fmaxf, std::fminf;

}  // namespace

#include GACT_SOURCE

namespace {

template <typename... A, size_t... i>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(A...), const uint64_t* arguments,
                                                 std::index_sequence<i...>) {
  kernel(same_bits<std::remove_const_t<A>>(arguments[i])...);
}
template <typename... A>
void call(void (*kernel)(A...), const uint64_t* arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>{});
}

}  // namespace

// GACT_NAMES is GACT_KERNEL(name) for each kernel of the source.
#define GACT_KERNEL(name) \
  if (!std::strcmp(wanted, #name)) return [](const uint64_t* arguments) { call(&name, arguments); };

extern "C" void (*simt_kernel(const char* wanted))(const uint64_t*) {
  GACT_NAMES
  return nullptr;
}
