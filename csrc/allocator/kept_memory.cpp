// An allocator that keeps the memory of freed tensors for later tensors.
//
// The C library returns the memory of large freed tensors to the system, so the next tensor causes
// a page fault for each 4 KiB. This allocator reuses the memory. Kept memory and memory in use
// together never exceed the most memory that was in use in this step or the last, so the peak of
// the process stays the same. gact_graph/support/memory/policy.py decides when memory is kept.

#include <torch/csrc/stable/library.h>

#include <cstdint>

// AddressSanitizer checks only memory of the C library.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace gact_graph {
namespace {

// The least bytes of a tensor whose memory is kept. The C library itself keeps smaller ones.
constexpr size_t kLeast = size_t{1} << 16;

// The least bytes of a tensor that is aligned to huge pages, each of which costs one page fault
// instead of 512.
constexpr size_t kLarge = size_t{4} << 20;
constexpr size_t kHugePage = size_t{2} << 20;

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

char* round_up(char* place, size_t unit) {
  return place +
         (round_up(reinterpret_cast<size_t>(place), unit) - reinterpret_cast<size_t>(place));
}

// The alignment of a tensor of so many bytes.
size_t alignment_of(size_t bytes) { return bytes < kLarge ? page_size() : kHugePage; }

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Whether the address space or the data of the process is limited. Kept memory counts towards the
// limits, so other allocations could fail.
bool is_limited() {
  rlimit addresses, data;
  return getrlimit(RLIMIT_AS, &addresses) != 0 || getrlimit(RLIMIT_DATA, &data) != 0 ||
         addresses.rlim_cur != RLIM_INFINITY || data.rlim_cur != RLIM_INFINITY;
}

void release(void* begin);

// Each operation takes a number of steps that grows with the logarithm of the number of ranges.
class KeptMemory : public c10::Allocator {
 public:
  explicit KeptMemory(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* begin = nullptr;
    if (bytes >= kLeast) {
      const std::lock_guard<std::mutex> guard(mutex_);
      end_if_idle();
      if (on_) begin = take(round_up(bytes, page_size()));
    } else if (on_ && now() > until_) {
      end();
    }
    // Without memory, the inner allocator raises its own error.
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
      const auto range = used_.find(static_cast<char*>(begin));
      if (range != used_.end()) {
        const size_t bytes = range->second;
        used_.erase(range);
        in_use_ -= bytes;
        end_if_idle();
        if (on_) {
          offer(static_cast<char*>(begin), bytes);
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

  bool start_step(double seconds) {
    const std::lock_guard<std::mutex> guard(mutex_);
    last_most_ = on_ ? most_ : in_use_;
    most_ = in_use_;
    until_ = now() + seconds;
    on_ = !is_limited();
    shrink();
    return on_;
  }

  void end() {
    const std::lock_guard<std::mutex> guard(mutex_);
    on_ = false;
    shrink();
  }

  size_t kept_bytes() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return kept_bytes_;
  }

  // Held across a fork, so that the child's copy is consistent.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  void end_if_idle() {
    if (!on_ || (now() <= until_ && !is_limited())) return;
    on_ = false;
    shrink();
  }

  // Returns memory for a tensor; nullptr if the system has no more.
  char* take(size_t bytes) {
    char* begin = cut(bytes);
    if (begin == nullptr) {
      // Kept memory counts towards the peak, so it shrinks before the system provides more.
      const size_t with = in_use_ + bytes, most = std::max(most_, last_most_);
      shrink_to(most > with ? most - with : 0);
      begin = fetch(bytes);
    }
    if (begin == nullptr) {
      shrink_to(0);
      begin = fetch(bytes);
    }
    if (begin == nullptr) return nullptr;
    used_[begin] = bytes;
    in_use_ += bytes;
    most_ = std::max(most_, in_use_);
    shrink();
    return begin;
  }

  // Takes a part of the smallest range that suffices, or that suffices with any alignment. Small
  // parts are cut from the end, so that the range stays aligned to huge pages.
  char* cut(size_t bytes) {
    const size_t unit = alignment_of(bytes);
    for (const size_t enough : {bytes, bytes + unit - page_size()}) {
      const auto range = by_size_.lower_bound({enough, nullptr});
      if (range == by_size_.end()) return nullptr;
      const auto [size, begin] = *range;
      char* const first = unit == page_size() ? begin + (size - bytes) : round_up(begin, unit);
      if (first + bytes > begin + size) continue;
      take_out(begin, size, first, bytes);
      return first;
    }
    return nullptr;
  }

  static char* fetch(size_t bytes) {
    const size_t unit = alignment_of(bytes), spare = unit - page_size();
    void* const mapped =
        mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* const first = static_cast<char*>(mapped);
    char* const begin = round_up(first, unit);
    const size_t before = static_cast<size_t>(begin - first);
    if (before > 0) munmap(first, before);
    if (spare > before) munmap(begin + bytes, spare - before);
#ifdef MADV_HUGEPAGE
    // A system without huge pages ignores the advice.
    if (bytes >= kLarge) madvise(begin, bytes, MADV_HUGEPAGE);
#endif
    return begin;
  }

  // Lets the system take back whole huge pages when memory is short, as at the limit of a
  // container. Offering a huge page costs little; offering 512 small pages costs half as much as
  // fetching them.
  static void offer(char* begin, size_t bytes) {
#ifdef MADV_FREE
    if (bytes < kLarge) return;
    madvise(begin, bytes / kHugePage * kHugePage, MADV_FREE);
#endif
  }

  static void unmap(char* begin, size_t bytes) {
    // At the limit of mappings munmap fails; then only the memory is returned, not the addresses.
    if (munmap(begin, bytes) != 0) madvise(begin, bytes, MADV_DONTNEED);
  }

  // Adds a range to the kept ranges and merges it with its neighbors.
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

  // Removes a part of a kept range; the parts before and after it stay.
  void take_out(char* range, size_t size, char* begin, size_t bytes) {
    by_size_.erase({size, range});
    kept_.erase(range);
    kept_bytes_ -= size;
    if (begin > range) keep(range, static_cast<size_t>(begin - range));
    char* const end = begin + bytes;
    if (end < range + size) keep(end, static_cast<size_t>(range + size - end));
  }

  void shrink() { shrink_to(on_ ? std::max(most_, last_most_) - in_use_ : 0); }

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
  std::map<char*, size_t> used_, kept_;         // sizes of ranges by address
  std::set<std::pair<size_t, char*>> by_size_;  // kept ranges
  size_t kept_bytes_ = 0, in_use_ = 0, most_ = 0, last_most_ = 0;
  // Small allocations read these without the lock to notice the end of training.
  std::atomic<bool> on_ = false;
  std::atomic<double> until_ = 0;
};

// Never destroyed, since tensors may outlive static objects.
std::atomic<KeptMemory*> kept_memory = nullptr;

void release(void* begin) { kept_memory.load()->free(begin); }

bool start_keeping(double seconds) {
  static std::mutex creation;  // the thread that compiles this library begins steps, too
  const std::lock_guard<std::mutex> lock(creation);
  if (kept_memory.load() == nullptr) {
    c10::Allocator* inner = c10::GetCPUAllocator();
    if (inner->raw_deleter() == nullptr) return false;  // it frees only DataPtrs
    kept_memory = new KeptMemory(inner);
    pthread_atfork([] { kept_memory.load()->lock(); }, [] { kept_memory.load()->unlock(); },
                   [] { kept_memory.load()->unlock(); });
    c10::SetCPUAllocator(kept_memory.load());
  }
  return kept_memory.load()->start_step(seconds);
}

void end_keeping() {
  KeptMemory* memory = kept_memory.load();
  if (memory != nullptr) memory->end();
}

int64_t kept_bytes() {
  KeptMemory* memory = kept_memory.load();
  return memory == nullptr ? 0 : static_cast<int64_t>(memory->kept_bytes());
}

}  // namespace
}  // namespace gact_graph

#else  // another system, or a sanitizer

namespace gact_graph {
namespace {

bool start_keeping(double) { return false; }
void end_keeping() {}
int64_t kept_bytes() { return 0; }

}  // namespace
}  // namespace gact_graph

#endif

STABLE_TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def("start_keeping(float seconds) -> bool")
      .impl("start_keeping", TORCH_BOX(&gact_graph::start_keeping));
  library.def("end_keeping() -> ()").impl("end_keeping", TORCH_BOX(&gact_graph::end_keeping));
  library.def("kept_bytes() -> int").impl("kept_bytes", TORCH_BOX(&gact_graph::kept_bytes));
}
