// Huge pages for large results.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>

#include "tensor.h"

namespace gact_graph {

// Asks for huge pages for a large result: fresh memory costs a page fault for every 4 KiB, which
// takes longer than decoding it. A system without huge pages ignores the advice.
inline void advise_huge_pages(const Tensor& x) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const size_t size = nbytes(x);
  if (size < (size_t{4} << 20)) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(x.data_ptr()) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(x.data_ptr()) + size) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace gact_graph
