// Dynamic scheduling: a thread that has finished a part takes the next.
//
// There are more parts than threads, so that the other threads do not wait for one that the system
// has suspended.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>

#include "tensor.h"

namespace gact_graph {

constexpr int64_t kMostParts = 256;

// Calls work(part) for each part. An exception does not cross the stable ABI: the first is rethrown
// here.
template <typename Work>
void for_each_part(int64_t parts, const Work& work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  const int64_t threads = std::min<int64_t>(parts, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    try {
      for (int64_t part = next++; part < parts; part = next++) work(part);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// Calls work(begin, end) for ranges of at least `least` that partition [0, count). None is empty.
template <typename Work>
void for_each_range(int64_t count, int64_t least, const Work& work) {
  const int64_t parts = std::clamp<int64_t>(count / least, count > 0, kMostParts);
  for_each_part(parts,
                [&](int64_t part) { work(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace gact_graph
