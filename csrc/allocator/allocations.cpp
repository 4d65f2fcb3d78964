// The bytes that torch's CPU allocator hands out, an exact count: see
// gact_graph/ops/allocations.py.

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace gact_graph {
namespace {

namespace profiler = torch::profiler::impl;

// A profiler to the rest of torch, which observes no operations, only memory.
class Watch : public profiler::ProfilerStateBase {
 public:
  Watch()
      : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled,
                                                   /*report_input_shapes=*/false,
                                                   /*profile_memory=*/true)) {}

  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }

  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    held_ += bytes;  // negative when memory is freed
    recent_ = std::max(recent_, held_);
    most_ = std::max(most_, held_);
  }

  int64_t most() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return most_;
  }

  // Returns the peak since the last mark, and begins another part of the watch.
  int64_t mark() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(recent_, held_);
  }

 private:
  std::mutex mutex_;
  int64_t held_ = 0, recent_ = 0, most_ = 0;
};

thread_local std::shared_ptr<Watch> watch;

Watch& current() {
  TORCH_CHECK(watch != nullptr, "Expected a watch of allocations in this thread (got none)");
  return *watch;
}

// Returns false if a profiler of torch is active, since only one can receive reports.
bool start_watch() {
  if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) return false;
  watch = std::make_shared<Watch>();
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, watch);
  return true;
}

void end_watch() {
  current();
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
  watch.reset();
}

int64_t most_watched() { return current().most(); }

int64_t mark_watch() { return current().mark(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(GACT_LIBRARY, library) {
  library.def("start_watch() -> bool").impl("start_watch", TORCH_BOX(&start_watch));
  library.def("end_watch() -> ()").impl("end_watch", TORCH_BOX(&end_watch));
  library.def("most_watched() -> int").impl("most_watched", TORCH_BOX(&most_watched));
  library.def("mark_watch() -> int").impl("mark_watch", TORCH_BOX(&mark_watch));
}

}  // namespace gact_graph
