// Runs a CUDA kernel on the CPU, lane by lane, so that its source is tested where there is no GPU.
//
// The 32 lanes of a warp are fibers. Each runs to its next exchange with the others; when all have
// come to it, each goes on. An exchange that not all lanes reach, or not the same one, ends the
// process, as it would hang a GPU.

#include <c10/util/Half.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __global__

namespace {

constexpr int kWarp = 32;
constexpr size_t kStack = 256 << 10;

struct Index {
  unsigned x;
};
Index threadIdx, blockIdx, blockDim, gridDim;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "simt: %s\n", what);
  std::abort();
}

struct Lane {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  bool done;
  int exchanges;
};

Lane lanes[kWarp];
ucontext_t scheduler;
int running;
void (*body)(void**);
void** arguments;

// Two of each: a lane may be at the next exchange while others still read this one.
uint64_t given[2][kWarp];
int kinds[2][kWarp];

// Hands over a value and returns all lanes' values; `kind` must be the same in all lanes.
const uint64_t* exchange(uint64_t value, int kind) {
  Lane& lane = lanes[running];
  const int turn = lane.exchanges++ % 2, me = running;
  given[turn][me] = value;
  kinds[turn][me] = kind;
  swapcontext(&lane.context, &scheduler);
  for (int other : kinds[turn]) {
    if (other != kind) fail("lanes met at different exchanges");
  }
  return given[turn];
}

void run_lane() {
  body(arguments);
  lanes[running].done = true;
}

void run_warp(unsigned first) {
  for (Lane& lane : lanes) {
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = kStack;
    lane.context.uc_link = &scheduler;
    lane.done = false;
    lane.exchanges = 0;
    makecontext(&lane.context, &run_lane, 0);
  }
  for (int done = 0; done < kWarp;) {
    done = 0;
    for (running = 0; running < kWarp; ++running) {
      threadIdx.x = first + running;
      swapcontext(&scheduler, &lanes[running].context);
      done += lanes[running].done;
    }
    if (done && done < kWarp) fail("some lanes ended before an exchange of the others");
  }
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int far) {
  if (mask != 0xFFFFFFFFu) fail("a shuffle of some lanes");
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof value);
  const uint64_t* all = exchange(raw, far);
  std::memcpy(&value, &all[running ^ far], sizeof value);
  return value;
}

bool __any_sync(unsigned mask, bool value) {
  if (mask != 0xFFFFFFFFu) fail("a vote of some lanes");
  const uint64_t* all = exchange(value, -1);
  bool any = false;
  for (int i = 0; i < kWarp; ++i) any |= all[i] != 0;
  return any;
}

template <typename To, typename From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
int64_t __double_as_longlong(double x) { return same_bits<int64_t>(x); }
double __longlong_as_double(int64_t x) { return same_bits<double>(x); }
int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
[[noreturn]] void __trap() { fail("the kernel trapped"); }
using std::fmaf, std::fmaxf, std::fminf;

float half_to_float(uint16_t bits) { return c10::Half(bits, c10::Half::from_bits()); }
uint16_t half_of(float x) { return c10::Half(x).x; }

template <typename... A, size_t... i>
void call(void (*kernel)(A...), void** args, std::index_sequence<i...>) {
  kernel(*static_cast<std::remove_const_t<A>*>(args[i])...);
}
template <typename... A>
void call(void (*kernel)(A...), void** args) {
  call(kernel, args, std::index_sequence_for<A...>{});
}

}  // namespace

#include GACT_SOURCE

// GACT_NAMES is GACT_KERNEL(name) for each kernel of the source.
#define GACT_KERNEL(name) \
  if (!std::strcmp(wanted, #name)) body = [](void** args) { call(&name, args); };

extern "C" bool simt_launch(const char* wanted, unsigned blocks, unsigned threads, void** args) {
  body = nullptr;
  GACT_NAMES
  if (!body) return false;
  arguments = args;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (unsigned first = 0; first < threads; first += kWarp) run_warp(first);
  }
  return true;
}
