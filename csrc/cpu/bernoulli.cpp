// Bernoulli draws of PyTorch's CPU generator, many at a time: see gact_graph/ops/bernoulli.py.
//
// The generator is a Mersenne Twister, MT19937 (M. Matsumoto and T. Nishimura, "Mersenne Twister: A
// 623-dimensionally equidistributed uniform pseudorandom number generator", TOMACS 1998). PyTorch
// draws element after element; here all 624 words of a state are made at once, in vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "checks.h"
#include "lanes.h"

namespace gact_graph {
namespace {

constexpr int kWords = 624;
constexpr int kShift = 397;

// The bytes of torch.get_rng_state().
struct State {
  uint64_t seed;
  int32_t left;
  int32_t seeded;
  uint64_t next;
  uint64_t words[kWords];
  double normal[5];
};
static_assert(sizeof(State) == 5056);

inline uint32_t twist(uint32_t word, uint32_t following) {
  const uint32_t mixed = (word & 0x80000000u) | (following & 0x7fffffffu);
  return (mixed >> 1) ^ (-(following & 1u) & 0x9908b0dfu);
}

inline uint32_t temper(uint32_t y) {
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

class Generator {
 public:
  explicit Generator(const State& state) : used_(state.left == 1 ? kWords : state.next) {
    std::copy_n(state.words, kWords, words_);
    temper_all();
  }

  // Writes the next `count` words.
  void draw(uint32_t* out, int64_t count) {
    while (count > 0) {
      if (used_ == kWords) next_state();
      const int64_t taken = std::min<int64_t>(count, kWords - used_);
      std::memcpy(out, tempered_ + used_, taken * sizeof *out);
      out += taken, count -= taken, used_ += taken;
    }
  }

  void store(State& state) const {
    std::copy_n(words_, kWords, state.words);
    state.next = used_;
    state.left = kWords + 1 - static_cast<int32_t>(used_);
  }

 private:
  void next_state() {
    // Word i becomes a function of words i, i + 1 and i + 397, so vectors of words from i on depend
    // on no word that the same vector writes.
#pragma GCC ivdep
    for (int i = 0; i < kWords - kShift; ++i) {
      words_[i] = words_[i + kShift] ^ twist(words_[i], words_[i + 1]);
    }
#pragma GCC ivdep
    for (int i = kWords - kShift; i < kWords - 1; ++i) {
      words_[i] = words_[i + kShift - kWords] ^ twist(words_[i], words_[i + 1]);
    }
    words_[kWords - 1] = words_[kShift - 1] ^ twist(words_[kWords - 1], words_[0]);
    temper_all();
    used_ = 0;
  }

  void temper_all() {
    for (int i = 0; i < kWords; ++i) tempered_[i] = temper(words_[i]);
  }

  alignas(64) uint32_t words_[kWords];
  alignas(64) uint32_t tempered_[kWords];
  int64_t used_;
};

// Returns which of 64 numbers of 53 bits are below `bound`. Two words make a number, the first of
// them its upper bits.
inline uint64_t below(const uint32_t* drawn, uint64_t bound) {
  constexpr uint64_t kNumber = (uint64_t{1} << 53) - 1;
  uint64_t result = 0;
#if GACT_AVX512 || GACT_AVX2
  const __m256i mask = _mm256_set1_epi64x(kNumber), limit = _mm256_set1_epi64x(bound);
#pragma GCC unroll 16
  for (int i = 0; i < kTile; i += 4) {
    const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(drawn + 2 * i));
    const __m256i number = _mm256_and_si256(_mm256_shuffle_epi32(pair, 0xb1), mask);
    const __m256d passed = _mm256_castsi256_pd(_mm256_cmpgt_epi64(limit, number));
    result |= static_cast<uint64_t>(_mm256_movemask_pd(passed)) << i;
  }
#else
  for (int i = 0; i < kTile; ++i) {
    const uint64_t number =
        (static_cast<uint64_t>(drawn[2 * i]) << 32 | drawn[2 * i + 1]) & kNumber;
    result |= static_cast<uint64_t>(number < bound) << i;
  }
#endif
  return result;
}

void draw_bits(Tensor state, Tensor words, int64_t count, double p) {
  check_tensor("state", state, ScalarType::Byte, {static_cast<int64_t>(sizeof(State))});
  check_dim("words", words, 1);
  GACT_CHECK_VALUE(words.scalar_type() == ScalarType::Long, "Expected words of int64 (got ",
                   words.scalar_type(), ")");
  GACT_CHECK_VALUE(count >= 0 && ceil_div(count, kTile) == words.numel(),
                   "Expected count to be that of ", words.numel(), " words (got ", count, ")");
  GACT_CHECK_VALUE(0 <= p && p <= 1, "Expected p from 0 to 1 (got ", p, ")");
  check_no_overlap({&state, &words}, {});
  State parsed;
  std::memcpy(&parsed, state.const_data_ptr(), sizeof parsed);
  GACT_CHECK_VALUE(1 <= parsed.left && parsed.left <= kWords && parsed.next <= kWords,
                   "Expected state to be that of a generator (got other bytes)");
  if (count == 0) return;
  auto* to = reinterpret_cast<uint64_t*>(mutable_data<int64_t>(words));
  // A number of 53 bits times 2^-53 is below p.
  const auto bound = static_cast<uint64_t>(std::ceil(std::ldexp(p, 53)));
  Generator generator(parsed);
  for (int64_t first = 0; first < count; first += kTile) {
    uint32_t drawn[2 * kTile] = {};
    const int64_t number = std::min<int64_t>(count - first, kTile);
    generator.draw(drawn, 2 * number);
    const uint64_t used = number == kTile ? ~uint64_t{0} : (uint64_t{1} << number) - 1;
    *to++ = below(drawn, bound) & used;
  }
  generator.store(parsed);
  std::memcpy(state.mutable_data_ptr(), &parsed, sizeof parsed);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(GACT_LIBRARY, CPU, library) {
  library.impl("draw_bits", TORCH_BOX(&draw_bits));
}

}  // namespace gact_graph
