// Operations of the 32 lanes of a warp, which all lanes must call together.
#pragma once

#include "../noise.h"

namespace gact_graph {

constexpr int kLanes = 32;
constexpr int kTile = 64;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

inline int lane_of_thread() { return threadIdx.x % kLanes; }
inline int64_t warp_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
}
inline int64_t warps_of_grid() { return static_cast<int64_t>(gridDim.x) * (blockDim.x / kLanes); }

inline float least_of_warp(float x) {
  for (int far = kLanes / 2; far; far /= 2) x = fminf(x, __shfl_xor_sync(kAllLanes, x, far));
  return x;
}
inline float greatest_of_warp(float x) {
  for (int far = kLanes / 2; far; far /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, far));
  return x;
}

// The 4x4 bits in each half of a word, row by row, as columns: its own inverse.
inline uint32_t transpose_bits(uint32_t x) {
  uint32_t moved = (x ^ x >> 3) & 0x0A0A0A0Au;
  x ^= moved ^ moved << 3;
  moved = (x ^ x >> 6) & 0x00CC00CCu;
  return x ^ moved ^ moved << 6;
}

// Of four neighboring lanes, nibble p of lane j (in each half of its word) becomes nibble j of
// lane p: its own inverse.
inline uint32_t transpose_lanes(uint32_t x, int lane) {
  uint32_t other = __shfl_xor_sync(kAllLanes, x, 1);
  x = lane & 1 ? (x & 0xF0F0F0F0u) | (other >> 4 & 0x0F0F0F0Fu)
               : (x & 0x0F0F0F0Fu) | (other << 4 & 0xF0F0F0F0u);
  other = __shfl_xor_sync(kAllLanes, x, 2);
  return lane & 2 ? (x & 0xFF00FF00u) | (other >> 8 & 0x00FF00FFu)
                  : (x & 0x00FF00FFu) | (other << 8 & 0xFF00FF00u);
}

}  // namespace gact_graph
