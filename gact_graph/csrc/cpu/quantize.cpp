// pack and unpack on the CPU: see gact_graph/quantizer.py for the format.
// Work goes by tiles of 64 elements: b words of 64 bits, one for each bit of the code.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>

#include "lanes.h"

namespace gact_graph {
namespace {

constexpr int64_t kTile = 64;

// A float32 has 24 bits of significand: what the code leaves of them, at most 16, is for the noise.
template <int kBits>
struct Width {
  static constexpr int kFraction = kBits <= 8 ? 16 : 24 - kBits;
  static constexpr int kTop = (1 << kBits) - 1;
};

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
float round_down_to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  return float_of((bits >> 31 ? bits + 0xFFFFu : bits) & 0xFFFF0000u);
}
float round_up_to_bf16(float x) { return float_of((bits_of(x) + 0xFFFFu) & 0xFFFF0000u); }

struct Stats {
  float low;
  float step;
};

// A step below the smallest normal number is raised to it: its reciprocal would overflow.
Stats stats_of(const Extent& extent, int top) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (!extent.finite()) return {nan, nan};
  const float low = round_down_to_bf16(extent.min() + 0.f);  // -0 counts as +0
  if (extent.min() == extent.max()) return {low, 0.f};
  const float step = round_up_to_bf16((extent.max() - low) / static_cast<float>(top));
  if (!std::isfinite(step)) return {nan, nan};
  return {low, std::max(step, std::numeric_limits<float>::min())};
}

// The elements of one tile, the last one filled up with its own last element, which widens no range.
template <typename T>
const T* whole_tile(const T* x, int64_t count, T* buffer) {
  if (count == kTile) return x;
  std::copy_n(x, count, buffer);
  std::fill(buffer + count, buffer + kTile, x[count - 1]);
  return buffer;
}

template <typename T, int kBits>
void pack_group(const T* x, int64_t count, int64_t index, uint64_t seed, uint64_t* words,
                at::BFloat16* stats) {
  constexpr int kTop = Width<kBits>::kTop;
  constexpr int kFraction = Width<kBits>::kFraction;
  T buffer[kTile];
  Extent extent;
  for (int64_t t = 0; t < count; t += kTile) {
    const T* tile = whole_tile(x + t, std::min(kTile, count - t), buffer);
    for (int lane = 0; lane < kTile; lane += kLanes) extent.add(read(tile + lane));
  }
  const Stats s = stats_of(extent, kTop);
  stats[0] = at::BFloat16(s.low);
  stats[1] = at::BFloat16(s.step);
  const int64_t tiles = (count + kTile - 1) / kTile;
  if (!(s.step > 0.f)) {
    std::fill_n(words, tiles * kBits, uint64_t{0});
    if (s.step == 0.f) {
      const double value = static_cast<double>(x[0]);
      std::memcpy(words, &value, sizeof value);
    }
    return;
  }
  const float scale = (1.f / s.step) * static_cast<float>(1 << kFraction);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t t = tile * kTile;
    const int64_t left = std::min(kTile, count - t);
    const T* from = whole_tile(x + t, left, buffer);
    uint64_t planes[kBits] = {};
    const NoiseKey key = noise_key(seed, static_cast<uint64_t>(index + t));
    for (int lane = 0; lane < kTile; lane += 2 * kLanes) {
      const NoisePair noise(static_cast<uint32_t>(index + t + lane), key);
      put_planes<kBits>(encode<kFraction>(read(from + lane), s.low, scale, noise.first, kTop), lane,
                        planes);
      put_planes<kBits>(
          encode<kFraction>(read(from + lane + kLanes), s.low, scale, noise.second, kTop),
          lane + kLanes, planes);
    }
    const uint64_t used = left == kTile ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
    for (int p = 0; p < kBits; ++p) words[tile * kBits + p] = planes[p] & used;
  }
}

template <typename T, int kBits>
void unpack_group(const uint64_t* words, const at::BFloat16* stats, int64_t count, T* x) {
  const float low = static_cast<float>(stats[0]);
  const float step = static_cast<float>(stats[1]);
  if (step == 0.f) {
    double value;
    std::memcpy(&value, words, sizeof value);
    std::fill_n(x, count, static_cast<T>(value));
    return;
  }
  T buffer[kTile];
  for (int64_t t = 0; t < count; t += kTile, words += kBits) {
    const bool whole = count - t >= kTile;
    T* to = whole ? x + t : buffer;
    for (int lane = 0; lane < kTile; lane += kLanes) {
      write(to + lane, decode(get_planes<kBits>(words, lane), low, step));
    }
    if (!whole) std::copy_n(buffer, count - t, x + t);
  }
}

// Calls run with the width as a constant.
template <typename F>
void for_width(int64_t bits, F&& run) {
  switch (bits) {
#define GACT_WIDTH(b) \
  case b:             \
    return run(std::integral_constant<int, b>{});
    GACT_WIDTH(1)
    GACT_WIDTH(2)
    GACT_WIDTH(3)
    GACT_WIDTH(4)
    GACT_WIDTH(5)
    GACT_WIDTH(6)
    GACT_WIDTH(7)
    GACT_WIDTH(8)
    GACT_WIDTH(9)
    GACT_WIDTH(10)
    GACT_WIDTH(11)
    GACT_WIDTH(12)
    GACT_WIDTH(13)
    GACT_WIDTH(14)
    GACT_WIDTH(15)
    GACT_WIDTH(16)
#undef GACT_WIDTH
    default:
      TORCH_CHECK_VALUE(false, "Expected bits from 1 to 16 (got ", bits, ")");
  }
}

// Fresh memory costs a page fault for every 4 KiB, which takes longer than decoding it. Large
// results ask for huge pages; where the system has none the advice changes nothing.
void advise_huge_pages(const at::Tensor& x) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const size_t size = x.nbytes();
  if (size < (size_t{4} << 20)) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(x.data_ptr()) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(x.data_ptr()) + size) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

int64_t groups_per_task(int64_t group_size) {
  return std::max<int64_t>(1, (int64_t{1} << 15) / group_size);
}

std::tuple<at::Tensor, at::Tensor> pack(const at::Tensor& input, int64_t bits, int64_t group_size,
                                        int64_t seed) {
  const at::Tensor x = input.contiguous();
  const int64_t n = x.numel();
  const int64_t groups = (n + group_size - 1) / group_size;
  at::Tensor codes = at::empty({(n + kTile - 1) / kTile, bits}, x.options().dtype(at::kLong));
  at::Tensor stats = at::empty({groups, 2}, x.options().dtype(at::kBFloat16));
  auto* words = reinterpret_cast<uint64_t*>(codes.data_ptr<int64_t>());
  auto* pairs = stats.data_ptr<at::BFloat16>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pack", [&] {
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    for_width(bits, [&](auto width) {
      at::parallel_for(0, groups, groups_per_task(group_size), [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g) {
          const int64_t start = g * group_size;
          pack_group<scalar_t, width>(from + start, std::min(group_size, n - start), start,
                                      static_cast<uint64_t>(seed), words + start / kTile * width,
                                      pairs + 2 * g);
        }
      });
    });
  });
  return {codes, stats};
}

at::Tensor unpack(const at::Tensor& codes, const at::Tensor& stats, at::IntArrayRef shape,
                  int64_t bits, int64_t group_size, at::ScalarType dtype) {
  at::Tensor x = at::empty(shape, codes.options().dtype(dtype));
  advise_huge_pages(x);
  const int64_t n = x.numel();
  const int64_t groups = (n + group_size - 1) / group_size;
  const auto* words = reinterpret_cast<const uint64_t*>(codes.const_data_ptr<int64_t>());
  const auto* pairs = stats.const_data_ptr<at::BFloat16>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "unpack", [&] {
    scalar_t* to = x.mutable_data_ptr<scalar_t>();
    for_width(bits, [&](auto width) {
      at::parallel_for(0, groups, groups_per_task(group_size), [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g) {
          const int64_t start = g * group_size;
          unpack_group<scalar_t, width>(words + start / kTile * width, pairs + 2 * g,
                                        std::min(group_size, n - start), to + start);
        }
      });
    });
  });
  return x;
}

}  // namespace

TORCH_LIBRARY(GACT_LIBRARY, library) {
  library.def("pack(Tensor x, int bits, int group_size, int seed) -> (Tensor, Tensor)", &pack);
  library.def(
      "unpack(Tensor codes, Tensor stats, int[] shape, int bits, int group_size, ScalarType dtype)"
      " -> Tensor",
      &unpack);
}

}  // namespace gact_graph
