// Counts how often csrc/allocator/kept_memory.cpp compares two of its ranges: what a map or a set
// does at each step from one node to the next. Compiled in front of that file, with -include.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

inline int64_t comparisons = 0;  // under the lock of the memory

template <>
struct std::less<char*> {
  bool operator()(char* one, char* other) const {
    ++comparisons;
    return reinterpret_cast<std::uintptr_t>(one) < reinterpret_cast<std::uintptr_t>(other);
  }
};

template <>
struct std::less<std::pair<std::size_t, char*>> {
  using Range = std::pair<std::size_t, char*>;
  bool operator()(const Range& one, const Range& other) const {
    ++comparisons;
    return one < other;
  }
};

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def("comparisons() -> int", [] { return comparisons; });
}
