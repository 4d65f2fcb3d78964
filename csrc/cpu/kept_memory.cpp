// Memory of large tensors on the CPU that is kept for the tensors that follow.
//
// The C library returns a freed tensor of many MB to the system at once, and the next one of that
// size fetches its pages anew: a page fault for each 4 KiB, a third of a training step's time. Here
// freed memory stays, and the next large tensor takes it: a part of one range of addresses, or the
// pages of several, which the system moves to a new range without touching them. What is kept and
// what is in use never exceed together what was in use at some moment of this step or of the last:
// the process peaks no higher than it would without.

#include <torch/library.h>

#include <cstdint>

#include "memory.h"

// AddressSanitizer watches what the C library hands out, and nothing else.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace gact_graph {
namespace {

// The least that is kept. What is smaller stays with the C library, which keeps it as well.
constexpr size_t kLeast = size_t{1} << 16;

// From this size on a tensor begins where a huge page may begin: one of these has one place in the
// processor's table of pages instead of 512, and is moved as a whole.
constexpr size_t kLarge = size_t{4} << 20;
constexpr size_t kHugePage = size_t{2} << 20;

// Linux allows a process 65,530 mappings. With more seams than this, nothing is joined any more,
// and what is fetched instead has none.
constexpr size_t kMostSeams = size_t{1} << 14;

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

char* round_up(char* place, size_t unit) {
  return place +
         (round_up(reinterpret_cast<size_t>(place), unit) - reinterpret_cast<size_t>(place));
}

// Where a tensor of so many bytes may begin.
size_t alignment_of(size_t bytes) { return bytes < kLarge ? page_size() : kHugePage; }

void release(void* begin);

class KeptMemory : public c10::Allocator {
 public:
  explicit KeptMemory(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* begin = nullptr;
    if (bytes >= kLeast) {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (on_) begin = take(round_up(bytes, page_size()));
    }
    // It says in its own words where there is no memory.
    if (begin == nullptr) return inner_->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(begin, bytes);
    return {begin, begin, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void free(void* begin) {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      const auto found = used_.find(static_cast<char*>(begin));
      if (found != used_.end()) {
        const size_t bytes = found->second;
        used_.erase(found);
        in_use_ -= bytes;
        if (on_) {
          keep(static_cast<char*>(begin), bytes);
          shrink();
        } else {
          unmap(static_cast<char*>(begin), bytes);
        }
        c10::profiledCPUMemoryReporter().Delete(begin);
        return;
      }
    }
    inner_->raw_deallocate(begin);
  }

  void start_step() {
    const std::lock_guard<std::mutex> guard(mutex_);
    last_most_ = on_ ? most_ : in_use_;
    most_ = in_use_;
    on_ = true;
    shrink();
  }

  void end() {
    const std::lock_guard<std::mutex> guard(mutex_);
    on_ = false;
    shrink_to(0);
  }

  size_t kept_bytes() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return kept_bytes_;
  }

  bool has(const void* begin) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return used_.count(static_cast<char*>(const_cast<void*>(begin))) > 0;
  }

  // Across a fork, the child's copy must not be one that another thread was about to change.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  // nullptr where the system has no more memory.
  char* take(size_t bytes) {
    char* begin = cut(bytes);
    if (begin == nullptr) begin = assemble(bytes);
    if (begin == nullptr) {
      shrink_to(0);
      begin = assemble(bytes);
    }
    if (begin == nullptr) return nullptr;
    used_[begin] = bytes;
    in_use_ += bytes;
    most_ = std::max(most_, in_use_);
    shrink();
    return begin;
  }

  // A part of the smallest range that suffices. Small parts are cut from the end, so that a range
  // goes on to begin where a huge page does.
  char* cut(size_t bytes) {
    const size_t unit = alignment_of(bytes);
    for (auto one = by_size_.lower_bound({bytes, nullptr}); one != by_size_.end(); ++one) {
      const auto [size, begin] = *one;
      char* const first = unit == page_size() ? begin + (size - bytes) : round_up(begin, unit);
      if (first + bytes > begin + size) continue;
      take_out(begin, size, first, bytes);
      return first;
    }
    return nullptr;
  }

  // A new range, with pages of kept ones as far as they go, and fresh ones for the rest.
  char* assemble(size_t bytes) {
    if (seams_.size() >= kMostSeams) forget_seams();
    char* const begin = reserve(bytes, alignment_of(bytes));
    if (begin == nullptr) return nullptr;
    size_t filled = 0;
    while (filled < bytes && seams_.size() < kMostSeams) {
      const auto [from, size] = part_for(bytes - filled, alignment_of(bytes));
      if (size == 0) break;
      const size_t moved = move(from, size, begin + filled);
      filled += moved;
      if (moved < size) {
        // Another thread may have got the addresses behind these since, so they are left alone.
        unmap(begin, filled);
        return nullptr;
      }
    }
    if (filled == bytes) return begin;
    // Before the system is asked for more, as what is kept counts as well.
    const size_t with = in_use_ + bytes, most = std::max(most_, last_most_);
    shrink_to(most > with ? most - with : 0);
    if (open(begin + filled, bytes - filled)) return begin;
    unmap(begin, bytes);
    return nullptr;
  }

  // A part of at most so many bytes of what is kept, which is kept no longer; of none, if no part
  // is worth a call of the system. Whole huge pages come first, where these are asked for.
  std::pair<char*, size_t> part_for(size_t bytes, size_t unit) {
    char* best = nullptr;
    size_t most = 0;
    for (auto one = by_size_.rbegin(); one != by_size_.rend() && one->first > most; ++one) {
      char* const first = round_up(one->second, unit);
      char* const end = one->second + one->first;
      if (first >= end) continue;
      const size_t rest = static_cast<size_t>(end - first);
      const size_t size = rest >= bytes ? bytes : rest / unit * unit;
      if (size > most) best = first, most = size;
    }
    if (most < kLeast) {
      return unit == page_size() ? std::pair<char*, size_t>{nullptr, 0}
                                 : part_for(bytes, page_size());
    }
    const auto range = std::prev(kept_.upper_bound(best));
    take_out(range->first, range->second, best, most);
    return {best, most};
  }

  // Addresses without memory.
  char* reserve(size_t bytes, size_t unit) {
    const size_t spare = unit - page_size();
    void* const found =
        mmap(nullptr, bytes + spare, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    char* const first = static_cast<char*>(found);
    char* const begin = round_up(first, unit);
    const size_t before = static_cast<size_t>(begin - first);
    if (before > 0) munmap(first, before);
    if (spare > before) munmap(begin + bytes, spare - before);
    sew(begin, bytes);
    return begin;
  }

  static bool open(char* begin, size_t bytes) {
    if (mprotect(begin, bytes, PROT_READ | PROT_WRITE) != 0) return false;
#ifdef MADV_HUGEPAGE
    // Where the system has none the advice changes nothing.
    if (bytes >= kLarge) madvise(begin, bytes, MADV_HUGEPAGE);
#endif
    return true;
  }

  // Returns how many bytes the system has moved, one mapping in a call. If it refuses one, the rest
  // is returned to it.
  size_t move(char* from, size_t bytes, char* to) {
    char* const end = from + bytes;
    char* at = from;
    auto seam = seams_.upper_bound(from);
    while (at < end) {
      char* const next = seam == seams_.end() ? end : std::min(*seam++, end);
      const size_t size = static_cast<size_t>(next - at);
      char* const place = to + (at - from);
      if (mremap(at, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED) break;
      seams_.insert(place);
      at = next;
    }
    const size_t moved = static_cast<size_t>(at - from);
    if (at < end) munmap(at, static_cast<size_t>(end - at));
    seams_.insert(to + moved);
    sew(from, bytes);
    return moved;
  }

  void unmap(char* begin, size_t bytes) {
    munmap(begin, bytes);
    sew(begin, bytes);
  }

  // Mappings begin and end here, and none does within.
  void sew(char* begin, size_t bytes) {
    seams_.erase(seams_.lower_bound(begin), seams_.upper_bound(begin + bytes));
    seams_.insert(begin);
    seams_.insert(begin + bytes);
  }

  // Of what was returned to the system.
  void forget_seams() {
    for (auto seam = seams_.begin(); seam != seams_.end();) {
      seam = is_in(used_, *seam) || is_in(kept_, *seam) ? std::next(seam) : seams_.erase(seam);
    }
  }

  static bool is_in(const std::map<char*, size_t>& ranges, char* place) {
    const auto next = ranges.upper_bound(place);
    return next != ranges.begin() && place < std::prev(next)->first + std::prev(next)->second;
  }

  // Neighbours become one range.
  void keep(char* begin, size_t bytes) {
    kept_bytes_ += bytes;
    auto next = kept_.lower_bound(begin);
    if (next != kept_.end() && next->first == begin + bytes) {
      bytes += next->second;
      by_size_.erase({next->second, next->first});
      next = kept_.erase(next);
    }
    if (next != kept_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == begin) {
        begin = before->first;
        bytes += before->second;
        by_size_.erase({before->second, before->first});
        kept_.erase(before);
      }
    }
    kept_.emplace(begin, bytes);
    by_size_.emplace(bytes, begin);
  }

  // A part of a range is kept no longer; what is before and behind it is.
  void take_out(char* range, size_t size, char* begin, size_t bytes) {
    by_size_.erase({size, range});
    kept_.erase(range);
    kept_bytes_ -= size;
    if (begin > range) keep(range, static_cast<size_t>(begin - range));
    char* const end = begin + bytes;
    if (end < range + size) keep(end, static_cast<size_t>(range + size - end));
  }

  void shrink() { shrink_to(std::max(most_, last_most_) - in_use_); }

  void shrink_to(size_t bytes) {
    while (kept_bytes_ > bytes) {
      const auto [size, begin] = *by_size_.rbegin();
      const size_t gone = std::min(size, round_up(kept_bytes_ - bytes, page_size()));
      char* const first = begin + (size - gone);
      take_out(begin, size, first, gone);
      unmap(first, gone);
    }
  }

  c10::Allocator* inner_;
  std::mutex mutex_;
  std::map<char*, size_t> used_, kept_;         // ranges by where they begin
  std::set<std::pair<size_t, char*>> by_size_;  // what is kept
  // Where a mapping of the system may begin or end: all such places in the ranges, and others.
  std::set<char*> seams_;
  size_t kept_bytes_ = 0, in_use_ = 0, most_ = 0, last_most_ = 0;
  bool on_ = false;
};

// Tensors may outlive whatever ends at exit.
KeptMemory* kept_memory = nullptr;

void release(void* begin) { kept_memory->free(begin); }

bool start_keeping() {
  if (kept_memory == nullptr) {
    c10::Allocator* inner = c10::GetCPUAllocator();
    if (inner->raw_deleter() == nullptr) return false;  // one that frees only what it made itself
    kept_memory = new KeptMemory(inner);
    pthread_atfork([] { kept_memory->lock(); }, [] { kept_memory->unlock(); },
                   [] { kept_memory->unlock(); });
    c10::SetCPUAllocator(kept_memory);
  }
  kept_memory->start_step();
  return true;
}

void end_keeping() {
  if (kept_memory != nullptr) kept_memory->end();
}

int64_t kept_bytes() {
  return kept_memory == nullptr ? 0 : static_cast<int64_t>(kept_memory->kept_bytes());
}

}  // namespace

bool is_kept_memory(const void* begin) { return kept_memory != nullptr && kept_memory->has(begin); }

}  // namespace gact_graph

#else  // no mremap, or none that should be used

namespace gact_graph {
namespace {

bool start_keeping() { return false; }
void end_keeping() {}
int64_t kept_bytes() { return 0; }

}  // namespace

bool is_kept_memory(const void*) { return false; }

}  // namespace gact_graph

#endif

TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def("start_keeping() -> bool", &gact_graph::start_keeping);
  library.def("end_keeping() -> ()", &gact_graph::end_keeping);
  library.def("kept_bytes() -> int", &gact_graph::kept_bytes);
}
