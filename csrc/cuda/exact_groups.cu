// The exact groups of a packed tensor on the GPU: see gact_graph/ops/quantize.py. There are rarely
// any, so a warp that finds none in its chunk of the statistics ends there.

#include "element.h"
#include "warp.h"

namespace gact_graph {

constexpr int kRounds = 32;                // of loads that are in flight
constexpr int kGroups = kRounds * kLanes;  // of a chunk

// Whether the group of a lane has no step: a NaN.
inline bool is_exact(const uint32_t* stats, int64_t group, int64_t groups) {
  return group < groups && (stats[group] >> 16 & 0x7FFFu) > 0x7F80u;
}

// The number of exact groups before `last`, a multiple of kLanes; at least `most` if there are
// more.
inline int64_t count_exact(const uint32_t* stats, int64_t last, int64_t most) {
  int64_t count = 0;
  for (int64_t g = 0; g < last && count < most; g += kLanes) {
    count += __popc(__ballot_sync(kAllLanes, is_exact(stats, g + lane_of_thread(), last)));
  }
  return count;
}

// Writes the numbers of the first `most` exact groups and their elements [most, width]. Further
// numbers and rows keep their values.
template <typename T>
void exact_groups(const T* x, int64_t n, int64_t group_size, const uint32_t* stats, int64_t groups,
                  int64_t most, int64_t* numbers, T* values) {
  const int64_t width = group_size < n ? group_size : n;
  for (int64_t w = warp_of_thread(); w * kGroups < groups; w += warps_of_grid()) {
    const int64_t first = w * kGroups;
    bool any = false;
    for (int i = 0; i < kRounds; ++i) {
      any |= is_exact(stats, first + i * kLanes + lane_of_thread(), groups);
    }
    if (!__any_sync(kAllLanes, any)) continue;
    int64_t row = count_exact(stats, first, most);
    for (int i = 0; i < kRounds && row < most; ++i) {
      const int64_t start = first + i * kLanes;
      uint32_t found = __ballot_sync(kAllLanes, is_exact(stats, start + lane_of_thread(), groups));
      for (; found && row < most; found &= found - 1, ++row) {
        const int64_t group = start + __ffs(static_cast<int>(found)) - 1;
        if (lane_of_thread() == 0) numbers[row] = group;
        for (int64_t c = lane_of_thread(); c < width; c += kLanes) {
          const int64_t element = group * group_size + c;
          values[row * width + c] = x[element < n ? element : n - 1];
        }
      }
    }
  }
}

}  // namespace gact_graph

#define GACT_EXACT_GROUPS(bytes, T)                                                               \
  extern "C" __global__ void exact_groups_##bytes(                                                \
      const T* __restrict__ x, int64_t n, int64_t group_size, const uint32_t* __restrict__ stats, \
      int64_t groups, int64_t most, int64_t* __restrict__ numbers, T* __restrict__ values) {      \
    gact_graph::exact_groups(x, n, group_size, stats, groups, most, numbers, values);             \
  }

GACT_EXACT_GROUPS(2, uint16_t)
GACT_EXACT_GROUPS(4, uint32_t)
GACT_EXACT_GROUPS(8, uint64_t)
