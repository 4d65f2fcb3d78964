// Memory of large tensors on the CPU that is kept for the tensors that follow.
//
// The C library returns a freed tensor of a few MB to the system at once, and the next one of that
// size fetches its pages anew: a page fault for each 4 KiB, a third of a training step's time. Here
// freed memory stays, and the next large tensor takes it, cut or extended to its size. What is kept
// and what is in use never exceed together what was in use at some moment of this step or of the
// last: the process peaks no higher than it would without.

#include <torch/library.h>

#include <cstdint>

// AddressSanitizer watches what the C library hands out, and nothing else.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

namespace gact_graph {
namespace {

// The least that is kept. What is smaller stays with the C library, which keeps it as well.
constexpr size_t kLeast = size_t{1} << 16;

void release(void* begin);

class KeptMemory : public c10::Allocator {
 public:
  explicit KeptMemory(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* begin = nullptr;
    if (bytes >= kLeast) {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (on_) begin = take(whole_pages(bytes));
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
      const auto found = used_.find(begin);
      if (found != used_.end()) {
        const size_t bytes = found->second;
        used_.erase(found);
        in_use_ -= bytes;
        if (on_) {
          keep(begin, bytes);
          shrink();
        } else {
          munmap(begin, bytes);
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

  // Across a fork, the child's copy must not be one that another thread was about to change.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static size_t whole_pages(size_t bytes) {
    static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
  }

  // nullptr where the system has no more memory.
  void* take(size_t bytes) {
    void* begin = from_kept(bytes);
    if (begin == nullptr) {
      // Before the system is asked for more, as what is kept counts as well.
      const size_t with = in_use_ + bytes, most = std::max(most_, last_most_);
      shrink_to(most > with ? most - with : 0);
      begin = fetch(bytes);
      if (begin == nullptr) {
        shrink_to(0);
        begin = fetch(bytes);
      }
      if (begin == nullptr) return nullptr;
    }
    used_[begin] = bytes;
    in_use_ += bytes;
    most_ = std::max(most_, in_use_);
    shrink();
    return begin;
  }

  // The smallest block that suffices, cut to size; else the largest one, extended.
  void* from_kept(size_t bytes) {
    if (kept_.empty()) return nullptr;
    auto found = kept_.lower_bound(bytes);
    if (found == kept_.end()) --found;
    const auto [size, begin] = *found;
    if (size < bytes) {
      void* moved = mremap(begin, size, bytes, MREMAP_MAYMOVE);
      if (moved == MAP_FAILED) return nullptr;
      remove(found);
      return moved;
    }
    remove(found);
    if (size > bytes) keep(static_cast<char*>(begin) + bytes, size - bytes);
    return begin;
  }

  static void* fetch(size_t bytes) {
    void* begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return begin == MAP_FAILED ? nullptr : begin;
  }

  void keep(void* begin, size_t bytes) {
    if (bytes < kLeast) {
      munmap(begin, bytes);
      return;
    }
    kept_.emplace(bytes, begin);
    kept_bytes_ += bytes;
  }

  void remove(std::multimap<size_t, void*>::iterator one) {
    kept_bytes_ -= one->first;
    kept_.erase(one);
  }

  void shrink() { shrink_to(std::max(most_, last_most_) - in_use_); }

  void shrink_to(size_t bytes) {
    while (kept_bytes_ > bytes) {
      const auto last = std::prev(kept_.end());
      const auto [size, begin] = *last;
      const size_t gone = std::min(size, whole_pages(kept_bytes_ - bytes));
      remove(last);
      if (gone < size) keep(begin, size - gone);
      munmap(static_cast<char*>(begin) + (size - gone), gone);
    }
  }

  c10::Allocator* inner_;
  std::mutex mutex_;
  std::unordered_map<void*, size_t> used_;
  std::multimap<size_t, void*> kept_;
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
}  // namespace gact_graph

#else  // no mremap, or none that should be used

namespace gact_graph {
namespace {

bool start_keeping() { return false; }
void end_keeping() {}
int64_t kept_bytes() { return 0; }

}  // namespace
}  // namespace gact_graph

#endif

TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def("start_keeping() -> bool", &gact_graph::start_keeping);
  library.def("end_keeping() -> ()", &gact_graph::end_keeping);
  library.def("kept_bytes() -> int", &gact_graph::kept_bytes);
}
