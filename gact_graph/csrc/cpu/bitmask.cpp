// One bit an element on the CPU: see gact_graph/bitmask.py for the format.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <atomic>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "memory.h"

namespace gact_graph {
namespace {

constexpr int64_t kWord = 64;
constexpr int64_t kWordsPerTask = 512;

int64_t words_of(int64_t count) { return (count + kWord - 1) / kWord; }

// The tests. Each tells of one element, and where the machine can, of sixteen at once.

struct Above {
  float threshold;
  template <typename T>
  bool operator()(T x) const {
    return static_cast<float>(x) > threshold;
  }
#ifdef __AVX512F__
  uint64_t sixteen(__m512 x) const {
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(threshold), _CMP_GT_OQ);
  }
#endif
};

struct NotAtMost {
  float threshold;
  template <typename T>
  bool operator()(T x) const {
    return !(static_cast<float>(x) <= threshold);
  }
#ifdef __AVX512F__
  uint64_t sixteen(__m512 x) const {
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(threshold), _CMP_NLE_UQ);
  }
#endif
};

// float64 is compared as such.
struct AboveDouble {
  double threshold;
  bool operator()(double x) const { return x > threshold; }
};
struct NotAtMostDouble {
  double threshold;
  bool operator()(double x) const { return !(x <= threshold); }
};

struct IsSet {
  bool operator()(bool x) const { return x; }
};

template <typename T, typename Test>
uint64_t word(const T* x, const Test& test) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, bool>) {
    const __m512i bytes = _mm512_loadu_si512(x);
    return _mm512_test_epi8_mask(bytes, bytes);
  } else if constexpr (std::is_same_v<T, float>) {
    uint64_t bits = 0;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) bits |= test.sixteen(_mm512_loadu_ps(x + 16 * i)) << (16 * i);
    return bits;
  }
#endif
  uint64_t bits = 0;
  for (int i = 0; i < kWord; ++i) bits |= static_cast<uint64_t>(test(x[i])) << i;
  return bits;
}

template <typename T, typename Test>
at::Tensor pack(const at::Tensor& x, const Test& test) {
  const int64_t n = x.numel();
  at::Tensor words = at::empty({words_of(n)}, x.options().dtype(at::kLong));
  auto* to = reinterpret_cast<uint64_t*>(words.data_ptr<int64_t>());
  const T* from = x.const_data_ptr<T>();
  at::parallel_for(0, n / kWord, kWordsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) to[w] = word(from + w * kWord, test);
  });
  if (n % kWord) {
    uint64_t bits = 0;
    for (int64_t i = n / kWord * kWord; i < n; ++i) {
      bits |= static_cast<uint64_t>(test(from[i])) << (i % kWord);
    }
    to[n / kWord] = bits;
  }
  return words;
}

at::Tensor pack_bits(const at::Tensor& input, int64_t test, double threshold) {
  const at::Tensor x = input.contiguous();
  if (test == 0) return pack<bool>(x, IsSet{});
  if (x.scalar_type() == at::kDouble) {
    if (test == 1) return pack<double>(x, AboveDouble{threshold});
    return pack<double>(x, NotAtMostDouble{threshold});
  }
  at::Tensor words;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pack_bits", [&] {
    // As torch's own thresholds: types narrower than float32 are compared in float32.
    const auto bound = static_cast<float>(threshold);
    words = test == 1 ? pack<scalar_t>(x, Above{bound}) : pack<scalar_t>(x, NotAtMost{bound});
  });
  return words;
}

template <size_t kSize>
using Bits =
    std::conditional_t<kSize == 2, uint16_t, std::conditional_t<kSize == 4, uint32_t, uint64_t>>;

std::tuple<at::Tensor, at::Tensor> pack_pair(const at::Tensor& input, double low, double high) {
  const at::Tensor x = input.contiguous();
  const int64_t n = x.numel();
  at::Tensor words = at::empty({words_of(n)}, x.options().dtype(at::kLong));
  at::Tensor matched = at::empty({}, x.options().dtype(at::kBool));
  auto* to = reinterpret_cast<uint64_t*>(words.data_ptr<int64_t>());
  std::atomic<bool> all{true};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pack_pair", [&] {
    using Raw = Bits<sizeof(scalar_t)>;
    const scalar_t values[2] = {static_cast<scalar_t>(low), static_cast<scalar_t>(high)};
    Raw raw[2];
    std::memcpy(raw, values, sizeof raw);
    const Raw* from = reinterpret_cast<const Raw*>(x.const_data_ptr<scalar_t>());
    at::parallel_for(0, words_of(n), kWordsPerTask, [&](int64_t begin, int64_t end) {
      bool good = true;
      for (int64_t w = begin; w < end; ++w) {
        const Raw* p = from + w * kWord;
        const int64_t count = std::min(kWord, n - w * kWord);
        uint64_t ones = 0, zeros = 0;
#ifdef __AVX512F__
        if constexpr (sizeof(Raw) == 4) {
          if (count == kWord) {
            for (int i = 0; i < 4; ++i) {
              const __m512i v = _mm512_loadu_si512(p + 16 * i);
              const __m512i one = _mm512_set1_epi32(static_cast<int>(raw[1]));
              const __m512i zero = _mm512_set1_epi32(static_cast<int>(raw[0]));
              ones |= static_cast<uint64_t>(_mm512_cmpeq_epi32_mask(v, one)) << (16 * i);
              zeros |= static_cast<uint64_t>(_mm512_cmpeq_epi32_mask(v, zero)) << (16 * i);
            }
            good = good && (ones | zeros) == ~uint64_t{0};
            to[w] = ones;
            continue;
          }
        }
#endif
        for (int64_t i = 0; i < count; ++i) {
          ones |= static_cast<uint64_t>(p[i] == raw[1]) << i;
          good = good && (p[i] == raw[1] || p[i] == raw[0]);
        }
        to[w] = ones;
      }
      if (!good) all = false;
    });
  });
  *matched.data_ptr<bool>() = all;
  return {words, matched};
}

template <typename T>
void spread(uint64_t bits, T low, T high, T* x) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, float>) {
    for (int i = 0; i < 4; ++i) {
      const auto mask = static_cast<__mmask16>(bits >> (16 * i));
      _mm512_storeu_ps(x + 16 * i,
                       _mm512_mask_mov_ps(_mm512_set1_ps(low), mask, _mm512_set1_ps(high)));
    }
    return;
  } else if constexpr (std::is_same_v<T, bool>) {
    const __m512i one = _mm512_set1_epi8(static_cast<char>(high));
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(low));
    _mm512_storeu_si512(x, _mm512_mask_mov_epi8(zero, bits, one));
    return;
  }
#endif
  for (int i = 0; i < kWord; ++i) x[i] = (bits >> i) & 1 ? high : low;
}

at::Tensor unpack_bits(const at::Tensor& words, at::IntArrayRef shape, double low, double high,
                       at::ScalarType dtype) {
  at::Tensor x = at::empty(shape, words.options().dtype(dtype));
  const int64_t n = x.numel();
  TORCH_CHECK_VALUE(words.numel() == words_of(n) && words.is_contiguous(), "Expected ", words_of(n),
                    " words for this shape (got ", words.numel(), ")");
  advise_huge_pages(x);
  const auto* from = reinterpret_cast<const uint64_t*>(words.const_data_ptr<int64_t>());
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "unpack_bits", [&] {
    const auto zero = static_cast<scalar_t>(low), one = static_cast<scalar_t>(high);
    scalar_t* to = x.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, n / kWord, kWordsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) spread<scalar_t>(from[w], zero, one, to + w * kWord);
    });
    for (int64_t i = n / kWord * kWord; i < n; ++i) {
      to[i] = (from[i / kWord] >> (i % kWord)) & 1 ? one : zero;
    }
  });
  return x;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def("pack_bits(Tensor x, int test, float threshold) -> Tensor", &pack_bits);
  library.def("pack_pair(Tensor x, float low, float high) -> (Tensor, Tensor)", &pack_pair);
  library.def(
      "unpack_bits(Tensor words, int[] shape, float low, float high, ScalarType dtype) -> Tensor",
      &unpack_bits);
}

}  // namespace gact_graph
