// A tile of 64 elements, and constants of the widths of codes.
#pragma once

#include "../noise.h"

namespace gact_graph {

constexpr int kTile = 64;

// Bits of noise below the code: the rest of a float32's 24 bits of significand, at most 16.
constexpr int fraction_bits(int bits) { return bits <= 8 ? 16 : 24 - bits; }
constexpr float grain(int bits) { return 1.f / static_cast<float>(1 << fraction_bits(bits)); }
constexpr int top_code(int bits) { return (1 << bits) - 1; }

}  // namespace gact_graph
