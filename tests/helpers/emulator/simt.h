// The warps of a launch and the memory that they access, for the kernels' translation unit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

constexpr int kWarp = 32;

struct Index {
  unsigned x;
};
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();

// Exchanges between the lanes of a warp. Each lane must come to the same.
int lane();
uint64_t value_of_lane(uint64_t value, int kind, int lane);
uint32_t votes_of_warp(bool value);

// Ends the launch with an error, which names the lane.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

float half_to_float(uint16_t bits);
uint16_t half_of(float x);

// The number of the running thread in the grid, and whether an address is on its stack.
unsigned running_thread();
bool is_on_stack(const char* address);

// A tensor among the arguments of a kernel. `written` marks its bytes that have a value; null if
// all have.
struct Tensor {
  char* data;
  size_t bytes;
  uint8_t* written;
  int argument;
};

// Moves tensors to memory with wide gaps between them, and their new addresses to the arguments.
void move_in(Tensor* tensors, int count, uint64_t* arguments);
// Moves them back after a launch.
void move_out();
// Checks what depends on the access that a lane has just made.
void settle();

}  // namespace simt
