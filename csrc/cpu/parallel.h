// Dynamic scheduling: a thread that has finished a part takes the next.
//
// There are more parts than threads, so that the other threads do not wait for one that the system
// has suspended.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace gact_graph {

constexpr int64_t kMostParts = 256;

// Calls work(part) for each part.
template <typename Work>
void for_each_part(int64_t parts, const Work& work) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(parts, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t part = next++; part < parts; part = next++) work(part);
  });
}

// Calls work(begin, end) for ranges of at least `least` that partition [0, count). None is empty.
template <typename Work>
void for_each_range(int64_t count, int64_t least, const Work& work) {
  const int64_t parts = std::clamp<int64_t>(count / least, count > 0, kMostParts);
  for_each_part(parts,
                [&](int64_t part) { work(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace gact_graph
