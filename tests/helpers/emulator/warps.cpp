// Runs a CUDA kernel on the CPU, lane by lane, so that its source is tested where there is no GPU.
//
// The 32 lanes of a warp are fibers. Each runs to its next exchange with the others; when all have
// come to it, each goes on. A GPU promises no order of warps, nor of lanes between two exchanges,
// so both are drawn from a seed.

#undef _FORTIFY_SOURCE  // longjmp() to another stack is no mistake

#include <c10/util/Half.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <numeric>
#include <utility>
#include <vector>

#include "simt.h"

namespace simt {
namespace {

constexpr size_t kStack = 256 << 10;
constexpr int kVote = -1;

struct Lane {
  std::vector<char> stack = std::vector<char>(kStack);
  jmp_buf place;
  bool begun = false;  // whether it has a place
  bool done;
  int exchanges;
};

Lane lanes[kWarp];
jmp_buf scheduler;
int running;
unsigned first_of_warp, block, blocks, threads;
void (*kernel)(const uint64_t*);
const uint64_t* arguments;
char error[512];
uint64_t random_state;

// Two of each: a lane may be at the next exchange while others still read this one.
uint64_t given[2][kWarp];
int kinds[2][kWarp];

// SplitMix64.
uint64_t draw() {
  uint64_t z = random_state += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

template <typename T>
void shuffle(T* items, size_t count) {
  for (size_t i = count; i > 1; --i) std::swap(items[i - 1], items[draw() % i]);
}

// Switches from a lane to the scheduler and, later, back. swapcontext() would ask the kernel for
// signals each time.
void leave(Lane& lane) {
  if (!_setjmp(lane.place)) _longjmp(scheduler, 1);
}

void run_lane() {
  for (;;) {
    kernel(arguments);
    settle();
    lanes[running].done = true;
    leave(lanes[running]);
  }
}

// Runs a lane until it leaves.
void enter(Lane& lane) {
  if (_setjmp(scheduler)) return;
  if (std::exchange(lane.begun, true)) _longjmp(lane.place, 1);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = lane.stack.data();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, &run_lane, 0);
  setcontext(&context);
}

// Hands over a value and returns all lanes' values; `kind` must be the same in all lanes.
const uint64_t* exchange(uint64_t value, int kind) {
  settle();
  Lane& lane = lanes[running];
  const int turn = lane.exchanges++ % 2, me = running;
  given[turn][me] = value;
  kinds[turn][me] = kind;
  leave(lane);
  for (int other : kinds[turn]) {
    if (other != kind) fail("all lanes at one exchange (got several)");
  }
  return given[turn];
}

void run_warp() {
  for (Lane& lane : lanes) {
    lane.done = false;
    lane.exchanges = 0;
  }
  int order[kWarp];
  std::iota(order, order + kWarp, 0);
  for (int done = 0; done < kWarp;) {
    done = 0;
    shuffle(order, kWarp);
    for (int lane : order) {
      running = lane;
      enter(lanes[lane]);
      if (*error) return;
      done += lanes[lane].done;
    }
    if (done && done < kWarp) {
      std::snprintf(error, sizeof error, "all lanes at one exchange (got the end of %d)", done);
      return;
    }
  }
}

}  // namespace

Index thread_index() { return {first_of_warp + running}; }
Index block_index() { return {block}; }
Index block_size() { return {threads}; }
Index grid_size() { return {blocks}; }

unsigned running_thread() { return block * threads + first_of_warp + running; }

bool is_on_stack(const char* address) {
  const char* stack = lanes[running].stack.data();
  return address >= stack && address < stack + kStack;
}

int lane() { return running; }

uint64_t value_of_lane(uint64_t value, int kind, int lane) { return exchange(value, kind)[lane]; }

uint32_t votes_of_warp(bool value) {
  const uint64_t* all = exchange(value, kVote);
  uint32_t votes = 0;
  for (int i = 0; i < kWarp; ++i) votes |= static_cast<uint32_t>(all[i] != 0) << i;
  return votes;
}

void fail(const char* format, ...) {
  va_list items;
  va_start(items, format);
  const int length = std::vsnprintf(error, sizeof error, format, items);
  va_end(items);
  std::snprintf(error + length, sizeof error - length, " by lane %d of warp %u of block %u",
                running, first_of_warp / kWarp, block);
  _longjmp(scheduler, 1);
}

float half_to_float(uint16_t bits) { return c10::Half(bits, c10::Half::from_bits()); }
uint16_t half_of(float x) { return c10::Half(x).x; }

}  // namespace simt

// Returns an error, or null.
extern "C" const char* simt_launch(void (*of_kernel)(const uint64_t*), unsigned grid, unsigned each,
                                   uint64_t seed, uint64_t* values, simt::Tensor* tensors,
                                   int count) {
  using namespace simt;
  kernel = of_kernel, arguments = values, blocks = grid, threads = each, random_state = seed;
  *error = '\0';
  move_in(tensors, count, values);
  std::vector<unsigned> order(blocks * threads / kWarp);
  std::iota(order.begin(), order.end(), 0);
  shuffle(order.data(), order.size());
  for (unsigned warp : order) {
    block = warp / (threads / kWarp);
    first_of_warp = warp % (threads / kWarp) * kWarp;
    run_warp();
    if (*error) break;
  }
  if (*error) {
    for (Lane& lane : lanes) lane.begun = false;  // wherever they are
  }
  move_out();
  return *error ? error : nullptr;
}
