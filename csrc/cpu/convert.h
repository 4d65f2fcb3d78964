// Conversion of a tile to and from float32, as plain loops.
#pragma once

#include "tile.h"

namespace gact_graph {

template <typename T>
inline void widen_tile(const T* from, float* to) {
  for (int i = 0; i < kTile; ++i) to[i] = static_cast<float>(from[i]);
}
template <typename T>
inline void narrow_tile(const float* from, T* to) {
  for (int i = 0; i < kTile; ++i) to[i] = static_cast<T>(from[i]);
}

}  // namespace gact_graph
