// A tile as plain loops, which the compiler may vectorize for what it targets: see lanes.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "convert.h"
#include "tile.h"

namespace gact_graph {

// The minimum and maximum of the added tiles, and whether all elements are finite.
class Extent {
 public:
  Extent() {
    std::fill_n(low_, kLanes, std::numeric_limits<float>::infinity());
    std::fill_n(high_, kLanes, -std::numeric_limits<float>::infinity());
  }
  void add(const float* tile) {
    // Sixteen of each, so that the loop has no chain of dependent comparisons.
    for (int t = 0; t < kTile; t += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        const float x = tile[t + i];
        low_[i] = x < low_[i] ? x : low_[i];
        high_[i] = x > high_[i] ? x : high_[i];
        // Zero times Inf or NaN is NaN, which a sum keeps.
        poison_[i] += x * 0.f;
      }
    }
  }
  bool finite() const {
    return std::none_of(poison_, poison_ + kLanes, [](float x) { return std::isnan(x); });
  }
  float min() const { return *std::min_element(low_, low_ + kLanes); }
  float max() const { return *std::max_element(high_, high_ + kLanes); }

 private:
  static constexpr int kLanes = 16;
  float low_[kLanes];
  float high_[kLanes];
  float poison_[kLanes] = {};
};

template <int kBits>
inline void encode_tile(const float* x, float low, float scale, uint32_t index, NoiseKey key,
                        uint64_t* words) {
  constexpr int kFraction = fraction_bits(kBits);
  uint32_t code[kTile];
  for (int pair = 0; pair < kTile; pair += 32) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t h = noise_hash(index + pair + i, key);
      code[pair + i] = (h & 0xFFFFu) >> (16 - kFraction);
      code[pair + i + 16] = h >> (32 - kFraction);
    }
  }
  for (int i = 0; i < kTile; ++i) {
    // lrint and not a cast: it rounds to nearest even, in one instruction.
    const int32_t fine = static_cast<int32_t>(std::lrint((x[i] - low) * scale));
    const int32_t whole = (fine + static_cast<int32_t>(code[i])) >> kFraction;
    code[i] = static_cast<uint32_t>(std::min(whole, top_code(kBits)));
  }
  for (int p = 0; p < kBits; ++p) {
    uint64_t word = 0;
    for (int i = 0; i < kTile; ++i) word |= static_cast<uint64_t>((code[i] >> p) & 1u) << i;
    words[p] = word;
  }
}

// Clamps to the range of the type: the step is rounded up, and must not turn a finite value into
// infinity. NaN fails both comparisons and is kept.
template <int kBits, bool kDecorrelated>
inline void decode_tile(const uint64_t* words, float low, float step, float limit, uint32_t index,
                        NoiseKey key, float* x) {
  constexpr float kUnit = kDecorrelated ? grain(kBits) : 1.f;
  uint32_t code[kTile] = {};
  for (int p = 0; p < kBits; ++p) {
    for (int i = 0; i < kTile; ++i) code[i] |= static_cast<uint32_t>((words[p] >> i) & 1u) << p;
  }
  if constexpr (kDecorrelated) {
    constexpr int kFraction = fraction_bits(kBits);
    for (int pair = 0; pair < kTile; pair += 32) {
      for (int i = 0; i < 16; ++i) {
        const uint32_t h = noise_hash(index + pair + i, key);
        const uint32_t noise[2] = {(h & 0xFFFFu) >> (16 - kFraction), h >> (32 - kFraction)};
        for (int half = 0; half < 2; ++half) {
          uint32_t& grains = code[pair + i + 16 * half];
          grains = (grains << kFraction) + (1u << kFraction) - 1u - 2u * noise[half];
        }
      }
    }
  }
  for (int i = 0; i < kTile; ++i) {
    const float level = static_cast<float>(static_cast<int32_t>(code[i])) * kUnit;
    const float y = level * step + low;
    x[i] = y > limit ? limit : (y < -limit ? -limit : y);
  }
}

}  // namespace gact_graph
