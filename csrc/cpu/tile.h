// A tile of 64 elements, and what the widths of codes have in common.
#pragma once

#include "../noise.h"

namespace gact_graph {

constexpr int kTile = 64;

// A float32 has 24 bits of significand: what the code leaves of them, at most 16, is for the noise.
constexpr int fraction_bits(int bits) { return bits <= 8 ? 16 : 24 - bits; }
constexpr float grain(int bits) { return 1.f / static_cast<float>(1 << fraction_bits(bits)); }
constexpr int top_code(int bits) { return (1 << bits) - 1; }

}  // namespace gact_graph
