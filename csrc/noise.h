// The noise of stochastic rounding: a pure function of (seed, element index), the same on every
// backend. It leaves the global generators alone, so quantizing changes no dropout mask.
//
// The low 48 bits of the seed choose the noise, and the high 16 bits are added to it, modulo 2^16:
// seeds that differ in these alone give a dither of each element (see gact_graph/capture/noise.py).
#pragma once

#ifdef __CUDACC_RTC__  // NVRTC has no headers of its own
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

namespace gact_graph {

struct NoiseKey {
  uint32_t first;
  uint32_t second;
  uint32_t shift;  // in both halves
};

// The counter of the hash has 32 bits; the bits above it go into the key, so that tensors of more
// than 2^32 elements do not repeat their noise. The mix is SplitMix64's finalizer (Steele et al.,
// "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
inline NoiseKey noise_key(uint64_t seed, uint64_t index) {
  const uint32_t shift = static_cast<uint32_t>(seed >> 48) * 0x10001u;
  uint64_t z = (seed & 0xFFFFFFFFFFFFull) + ((index >> 32) + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32), shift};
}

// One hash gives two elements 16 bits each: of every 32 consecutive elements, element j takes the
// low half and element j + 16 the high half of the hash of counter j. The vector kernels load
// 16 floats at a time, so a pair of loads shares one hash.
inline uint32_t noise_counter(uint32_t index) { return index & ~16u; }

inline uint32_t noise_hash(uint32_t counter, NoiseKey key) {
  uint32_t h = (counter ^ key.first) * 0x9E3779B1u;
  h ^= h >> 15;
  h = (h + key.second) * 0x85EBCA77u;
  h ^= h >> 13;
  h *= 0xC2B2AE3Du;
  h ^= h >> 16;
  // Without a carry from half to half.
  return ((h + key.shift) & 0xFFFFu) | ((h & 0xFFFF0000u) + (key.shift & 0xFFFF0000u));
}

inline uint32_t noise16(uint32_t index, NoiseKey key) {
  const uint32_t h = noise_hash(noise_counter(index), key);
  return (index & 16u) ? h >> 16 : h & 0xFFFFu;
}

}  // namespace gact_graph
