// Bit masks on the CPU: see gact_graph/ops/bitmask.py for the format.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "dtypes.h"
#include "lanes.h"
#include "memory.h"
#include "parallel.h"

namespace gact_graph {
namespace {

constexpr int64_t kWordsPerTask = 512;

int64_t words_of(int64_t count) { return ceil_div(count, kTile); }

// The tests of an element and, with AVX-512, of a vector of elements.

struct Nonzero {
  template <typename T>
  bool operator()(T x) const {
    return x != 0;
  }
#if GACT_AVX512
  __mmask16 lanes(__m512 x) const {
    return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  }
  __mmask16 lanes(__m512i x) const { return _mm512_test_epi32_mask(x, x); }
#endif
};

template <typename T>
struct Above {
  T threshold;
  bool operator()(T x) const { return x > threshold; }
#if GACT_AVX512
  __mmask16 lanes(__m512 x) const {
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(threshold), _CMP_GT_OQ);
  }
#endif
};

template <typename T>
struct NotAtMost {
  T threshold;
  bool operator()(T x) const { return !(x <= threshold); }
#if GACT_AVX512
  __mmask16 lanes(__m512 x) const {
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(threshold), _CMP_NLE_UQ);
  }
#endif
};

template <typename Raw>
struct Is {
  Raw value;
  bool operator()(Raw x) const { return x == value; }
#if GACT_AVX512
  __mmask16 lanes(__m512i x) const { return _mm512_cmpeq_epi32_mask(x, set1(value)); }
#endif
};

// Whether none of some bits is set.
template <typename Raw>
struct HasNone {
  Raw bits;
  bool operator()(Raw x) const { return !(x & bits); }
#if GACT_AVX512
  __mmask16 lanes(__m512i x) const { return _mm512_testn_epi32_mask(x, set1(bits)); }
#endif
};

#if GACT_AVX512
using gact_graph::read;
inline __m512i read(const uint32_t* p) { return _mm512_loadu_si512(p); }

template <typename T>
constexpr bool kHasLanes = std::is_same_v<T, float> || std::is_same_v<T, Half> ||
                           std::is_same_v<T, BFloat16> || std::is_same_v<T, uint32_t>;
#endif

// Types narrower than float32 are compared in float32.
template <typename T>
using Compared = std::conditional_t<(sizeof(T) <= 2 && !std::is_integral_v<T>), float, T>;

template <typename T, typename Test>
uint64_t whole_word(const T* x, const Test& test) {
#if GACT_AVX512
  if constexpr (std::is_same_v<T, uint8_t> && std::is_same_v<Test, Nonzero>) {
    const __m512i bytes = _mm512_loadu_si512(x);
    return _mm512_test_epi8_mask(bytes, bytes);
  } else if constexpr (kHasLanes<T>) {
    uint64_t word = 0;
#pragma GCC unroll 4
    for (int i = 0; i < kTile; i += kLanes) {
      word |= static_cast<uint64_t>(test.lanes(read(x + i))) << i;
    }
    return word;
  }
#endif
  // Through bytes, which compilers vectorize: bit after bit takes several times as long.
  uint8_t passed[kTile];
  for (int i = 0; i < kTile; ++i) passed[i] = test(static_cast<Compared<T>>(x[i]));
  uint64_t word = 0;
  for (int i = 0; i < kTile; i += 8) {
    uint64_t eight = 0;
    for (int j = 0; j < 8; ++j) eight |= static_cast<uint64_t>(passed[i + j]) << (8 * j);
    // The product's topmost byte gathers the lowest bit of each of the eight.
    word |= (eight * 0x0102040810204080u >> 56) << i;
  }
  return word;
}

template <typename T, typename Test>
uint64_t word_of(const T* x, int64_t count, const Test& test) {
  if (count >= kTile) return whole_word(x, test);
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) {
    word |= static_cast<uint64_t>(test(static_cast<Compared<T>>(x[i]))) << i;
  }
  return word;
}

Tensor empty_words(const Tensor& x) {
  Tensor words = empty({words_of(x.numel())}, ScalarType::Long);
  advise_huge_pages(words);
  return words;
}

Tensor checked_words(const Tensor& words, int64_t n) {
  check_readable("words", words);
  const Tensor contiguous = as_contiguous(words);
  check_tensor("words", contiguous, ScalarType::Long, {words_of(n)});
  return contiguous;
}

template <typename T, typename Test>
Tensor pack(const Tensor& x, const Test& test) {
  const int64_t n = x.numel();
  Tensor words = empty_words(x);
  auto* to = reinterpret_cast<uint64_t*>(mutable_data<int64_t>(words));
  const T* from = static_cast<const T*>(x.const_data_ptr());
  for_each_range(words_of(n), kWordsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) to[w] = word_of(from + w * kTile, n - w * kTile, test);
  });
  return words;
}

// An element to test for zero. A bool is read as a byte: a view of another dtype may hold other
// values than 0 and 1.
template <typename T>
auto testable(T x) {
  if constexpr (std::is_same_v<T, bool>) {
    return uint8_t{x};
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<std::make_unsigned_t<T>>(x);
  } else {
    return x;
  }
}

Tensor pack_nonzero(const Tensor& x) {
  return with_any_real(x.scalar_type(),
                       [&](auto zero) { return pack<decltype(testable(zero))>(x, Nonzero{}); });
}

Tensor pack_bits(const Tensor& input, int64_t test, double threshold) {
  check_readable("x", input);
  GACT_CHECK_VALUE(0 <= test && test <= 2, "Expected test from 0 to 2 (got ", test, ")");
  if (test == 0) {
    GACT_CHECK_VALUE(!is_complex(input.scalar_type()), "Expected x to be real (got ",
                     input.scalar_type(), ")");
  } else {
    check_coded("x", input.scalar_type());
  }
  const Tensor x = as_contiguous(input);
  if (test == 0) return pack_nonzero(x);
  return with_coded(x.scalar_type(), [&](auto real) {
    using scalar_t = decltype(real);
    // As in torch's threshold, types narrower than float32 are compared in float32.
    using T = Compared<scalar_t>;
    const T bound = static_cast<T>(threshold);
    return test == 1 ? pack<scalar_t>(x, Above<T>{bound}) : pack<scalar_t>(x, NotAtMost<T>{bound});
  });
}

template <typename F>
void with_integer_of_size(int64_t size, const F& f) {
  switch (size) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    default:
      return f(uint64_t{});
  }
}

// The bits of two numbers, converted to a real dtype.
template <typename Raw>
struct Pair {
  Raw values[2];
  Pair(double low, double high, ScalarType dtype) {
    with_any_real(dtype, [&](auto zero) {
      using T = decltype(zero);
      const T pair[2] = {converted<T>(low), converted<T>(high)};
      std::memcpy(values, pair, sizeof pair);
    });
  }
};

std::tuple<Tensor, Tensor> pack_pair(const Tensor& input, double low, double high) {
  check_readable("x", input);
  GACT_CHECK_VALUE(is_floating(input.scalar_type()), "Expected x to be floating-point (got ",
                   input.scalar_type(), ")");
  const Tensor x = as_contiguous(input);
  const int64_t n = x.numel();
  Tensor words = empty_words(x);
  Tensor matched = empty({}, ScalarType::Bool);
  auto* to = reinterpret_cast<uint64_t*>(mutable_data<int64_t>(words));
  std::atomic<bool> all{true};
  with_integer_of_size(x.element_size(), [&](auto integer) {
    using Raw = decltype(integer);
    const Pair<Raw> pair(low, high, x.scalar_type());
    const Is<Raw> is_low{pair.values[0]}, is_high{pair.values[1]};
    const Raw* from = static_cast<const Raw*>(x.const_data_ptr());
    for_each_range(words_of(n), kWordsPerTask, [&](int64_t begin, int64_t end) {
      uint64_t unmatched = 0;
      for (int64_t w = begin; w < end; ++w) {
        const Raw* p = from + w * kTile;
        const int64_t count = n - w * kTile;
        const uint64_t used = count >= kTile ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
        to[w] = word_of(p, count, is_high);
        unmatched |= used & ~(to[w] | word_of(p, count, is_low));
      }
      if (unmatched) all = false;
    });
  });
  *mutable_data<bool>(matched) = all;
  return {words, matched};
}

// Values are passed by value: a store to x could change references, which prevents vectorization.
template <typename Raw>
void spread(uint64_t word, Raw low, Raw high, Raw* x) {
#if GACT_AVX512
  if constexpr (sizeof(Raw) == 1) {
    const __m512i zeros = _mm512_set1_epi8(static_cast<char>(low));
    const __m512i ones = _mm512_set1_epi8(static_cast<char>(high));
    _mm512_storeu_si512(x, _mm512_mask_mov_epi8(zeros, word, ones));
    return;
  } else if constexpr (sizeof(Raw) == 2) {
    const __m512i zeros = _mm512_set1_epi16(static_cast<short>(low));
    const __m512i ones = _mm512_set1_epi16(static_cast<short>(high));
    for (int i = 0; i < kTile; i += 32) {
      const auto mask = static_cast<__mmask32>(word >> i);
      _mm512_storeu_si512(x + i, _mm512_mask_mov_epi16(zeros, mask, ones));
    }
    return;
  } else if constexpr (sizeof(Raw) == 4) {
    for (int i = 0; i < kTile; i += kLanes) {
      const auto mask = static_cast<__mmask16>(word >> i);
      _mm512_storeu_si512(x + i, _mm512_mask_mov_epi32(set1(low), mask, set1(high)));
    }
    return;
  }
#elif GACT_AVX2
  const auto store = [](void* to, __m256i zeros, __m256i ones, __m256i where) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_blendv_epi8(zeros, ones, where));
  };
  if constexpr (sizeof(Raw) == 1) {
    const __m256i zeros = _mm256_set1_epi8(static_cast<char>(low));
    const __m256i ones = _mm256_set1_epi8(static_cast<char>(high));
    for (int i = 0; i < kTile; i += 32) {
      store(x + i, zeros, ones, bytes_where(static_cast<uint32_t>(word >> i)));
    }
    return;
  } else if constexpr (sizeof(Raw) == 2) {
    const __m256i zeros = _mm256_set1_epi16(static_cast<short>(low));
    const __m256i ones = _mm256_set1_epi16(static_cast<short>(high));
    for (int i = 0; i < kTile; i += 16) {
      const __m256i where = bytes_where(static_cast<uint32_t>(word >> i));
      store(x + i, zeros, ones, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(where)));
    }
    return;
  } else if constexpr (sizeof(Raw) == 4) {
    const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < kTile; i += kLanes) {
      const __m256i bits = _mm256_and_si256(set1(static_cast<uint32_t>(word >> i)), lane_bit);
      store(x + i, set1(low), set1(high), _mm256_cmpeq_epi32(bits, lane_bit));
    }
    return;
  }
#endif
  // Eight at a time, so that bits are constants and compilers vectorize the loop.
  for (int i = 0; i < kTile; i += 8) {
    const Raw eight = static_cast<Raw>(word >> i & 0xFF);
    for (int j = 0; j < 8; ++j) x[i + j] = eight & Raw(1 << j) ? high : low;
  }
}

Tensor unpack_bits(const Tensor& input, const std::vector<int64_t>& shape, double low, double high,
                   ScalarType dtype) {
  const int64_t n = checked_numel(shape);
  GACT_CHECK_VALUE(!is_complex(dtype), "Expected a real dtype (got ", dtype, ")");
  const Tensor words = checked_words(input, n);
  Tensor x = empty(shape, dtype);
  advise_huge_pages(x);
  const auto* from = reinterpret_cast<const uint64_t*>(const_data<int64_t>(words));
  with_integer_of_size(x.element_size(), [&](auto integer) {
    using Raw = decltype(integer);
    const Pair<Raw> pair(low, high, dtype);
    const Raw low_bits = pair.values[0], high_bits = pair.values[1];
    Raw* to = static_cast<Raw*>(x.mutable_data_ptr());
    for_each_range(n / kTile, kWordsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) spread(from[w], low_bits, high_bits, to + w * kTile);
    });
    for (int64_t i = n / kTile * kTile; i < n; ++i) {
      to[i] = from[i / kTile] >> (i % kTile) & 1 ? high_bits : low_bits;
    }
  });
  return x;
}

// The elements of a tile whose bit is set, one after another; returns the next place.
template <typename Raw>
Raw* compress(uint64_t word, const Raw* x, Raw* to, bool is_whole) {
#if GACT_AVX512
  if constexpr (sizeof(Raw) == 4) {
    if (is_whole) {
      for (int i = 0; i < kTile; i += kLanes) {
        const auto mask = static_cast<__mmask16>(word >> i);
        const int count = __builtin_popcount(mask);
        // In a register, and then to memory: in one step it takes many times as long on Zen 4.
        const __m512i values = _mm512_maskz_compress_epi32(mask, _mm512_loadu_si512(x + i));
        _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1 << count) - 1), values);
        to += count;
      }
      return to;
    }
  }
#endif
  for (; word; word &= word - 1) *to++ = x[__builtin_ctzll(word)];
  return to;
}

// The reverse, with 0 where no bit is set.
template <typename Raw>
const Raw* expand(uint64_t word, const Raw* from, Raw* x, int64_t count) {
#if GACT_AVX512
  if constexpr (sizeof(Raw) == 4) {
    if (count >= kTile) {
      for (int i = 0; i < kTile; i += kLanes) {
        const auto mask = static_cast<__mmask16>(word >> i);
        const int set = __builtin_popcount(mask);
        const auto first = static_cast<__mmask16>((1 << set) - 1);
        const __m512i values = _mm512_maskz_loadu_epi32(first, from);
        _mm512_storeu_si512(x + i, _mm512_maskz_expand_epi32(mask, values));
        from += set;
      }
      return from;
    }
  }
#endif
  std::fill_n(x, std::min<int64_t>(count, kTile), Raw(0));
  for (; word; word &= word - 1) x[__builtin_ctzll(word)] = *from++;
  return from;
}

// The words of n elements, without bits after the last one, in blocks of kWordsPerTask, and the
// number of bits that are set before each block, and in all.
struct Bits {
  const uint64_t* words;
  int64_t n;
  std::vector<int64_t> before{0};

  Bits(const Tensor& input, int64_t count)
      : words(reinterpret_cast<const uint64_t*>(const_data<int64_t>(input))), n(count) {
    for (int64_t b = 0; b < blocks(); ++b) {
      int64_t set = before.back();
      for_each_word(b, [&](int64_t, uint64_t word, int64_t) { set += __builtin_popcountll(word); });
      before.push_back(set);
    }
  }

  int64_t blocks() const { return ceil_div(words_of(n), kWordsPerTask); }
  int64_t total() const { return before.back(); }

  // Calls work(first element, word, elements) for each word of a block.
  template <typename Work>
  void for_each_word(int64_t block, const Work& work) const {
    const int64_t end = std::min(words_of(n), (block + 1) * kWordsPerTask);
    for (int64_t w = block * kWordsPerTask; w < end; ++w) {
      const int64_t count = std::min<int64_t>(n - w * kTile, kTile);
      work(w * kTile, words[w] & (~uint64_t{0} >> (kTile - count)), count);
    }
  }
};

std::tuple<Tensor, Tensor> masked_select(const Tensor& input, const Tensor& input_words,
                                         bool with_negative_zeros) {
  check_readable("x", input);
  GACT_CHECK_VALUE(is_floating(input.scalar_type()), "Expected x to be floating-point (got ",
                   input.scalar_type(), ")");
  const Tensor x = as_contiguous(input), words = checked_words(input_words, input.numel());
  const Bits bits(words, x.numel());
  Tensor values = empty({bits.total()}, x.scalar_type());
  Tensor others_are_zero = empty({}, ScalarType::Bool);
  advise_huge_pages(values);
  std::atomic<bool> all{true};
  with_integer_of_size(x.element_size(), [&](auto integer) {
    using Raw = decltype(integer);
    const Raw all_bits = static_cast<Raw>(~Raw{0});
    const HasNone<Raw> is_zero{with_negative_zeros ? static_cast<Raw>(all_bits >> 1) : all_bits};
    const Raw* from = static_cast<const Raw*>(x.const_data_ptr());
    Raw* const to = static_cast<Raw*>(values.mutable_data_ptr());
    for_each_range(bits.blocks(), 1, [&](int64_t begin, int64_t end) {
      Raw* next = to + bits.before[begin];
      uint64_t others = 0;
      for (int64_t block = begin; block < end; ++block) {
        bits.for_each_word(block, [&](int64_t first, uint64_t word, int64_t count) {
          const uint64_t zeros = word_of(from + first, count, is_zero);
          others |= ~(word | zeros) & (~uint64_t{0} >> (kTile - count));
          next = compress(word, from + first, next, count == kTile);
        });
      }
      if (others) all = false;
    });
  });
  *mutable_data<bool>(others_are_zero) = all;
  return {values, others_are_zero};
}

Tensor masked_scatter(const Tensor& input, const Tensor& input_words, int64_t n) {
  check_readable("values", input);
  GACT_CHECK_VALUE(!is_complex(input.scalar_type()), "Expected a real dtype (got ",
                   input.scalar_type(), ")");
  checked_numel({n});
  const Tensor values = as_contiguous(input), words = checked_words(input_words, n);
  const Bits bits(words, n);
  GACT_CHECK_VALUE(values.numel() == bits.total(),
                   "Expected values to have an element for each bit that is set: ", bits.total(),
                   " (got ", values.numel(), ")");
  Tensor x = empty({n}, values.scalar_type());
  advise_huge_pages(x);
  with_integer_of_size(x.element_size(), [&](auto integer) {
    using Raw = decltype(integer);
    const Raw* const from = static_cast<const Raw*>(values.const_data_ptr());
    Raw* const to = static_cast<Raw*>(x.mutable_data_ptr());
    for_each_range(bits.blocks(), 1, [&](int64_t begin, int64_t end) {
      const Raw* next = from + bits.before[begin];
      for (int64_t block = begin; block < end; ++block) {
        bits.for_each_word(block, [&](int64_t first, uint64_t word, int64_t count) {
          next = expand(word, next, to + first, count);
        });
      }
    });
  });
  return x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("pack_bits", TORCH_BOX(&pack_bits));
  library.impl("pack_pair", TORCH_BOX(&pack_pair));
  library.impl("unpack_bits", TORCH_BOX(&unpack_bits));
  library.impl("masked_select", TORCH_BOX(&masked_select));
  library.impl("masked_scatter", TORCH_BOX(&masked_scatter));
}

}  // namespace gact_graph
