// The memory of a launch, with a check of each access: -fsanitize=thread calls a function before
// each load and store of a kernel, and these are here in place of the sanitizer's own.
//
// Two threads of one launch must not access the same byte if one of them writes to it, in one warp
// or in two. An exchange between lanes is no help: by CUDA's documentation, it orders no accesses
// to memory. Only writes of the same value are no error, since their order is irrelevant.

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "simt.h"

namespace simt {
namespace {

constexpr unsigned kSeveral = ~0u;
constexpr size_t kPage = 4096;
constexpr int kMost = 64;  // tensors of a launch

// The threads that have accessed a byte, counted from 1.
struct Byte {
  unsigned writer = 0;
  unsigned reader = 0;
};

// The memory of a tensor, or of several that overlap.
struct Block {
  Tensor tensor;
  char* begin;
  std::vector<Byte> bytes;
};

std::vector<Block> blocks;
char* arena = nullptr;
size_t room = 0;  // of each block, a power of two

// A write of other threads' bytes that is about to happen.
struct {
  char* address;
  std::vector<char> before;
} pending;

void reserve(size_t most) {
  if (most * 2 <= room) return;
  if (arena) munmap(arena, room * kMost);
  room = std::max<size_t>(room, 1 << 20);
  while (room < most * 2) room *= 2;
  void* all = mmap(nullptr, room * kMost, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) std::abort();
  arena = static_cast<char*>(all);
}

// The block of an address, of which it may lie outside; null far from all.
Block* find(const char* address) {
  if (address < arena) return nullptr;
  const size_t number = static_cast<size_t>(address - arena) / room;
  return number < blocks.size() ? &blocks[number] : nullptr;
}

Block& check(const char* access, const char* address, size_t size) {
  settle();
  Block* block = find(address);
  if (!block) fail("a %s within the tensors (got %zu bytes elsewhere)", access, size);
  const long long offset = address - block->begin;
  const size_t bytes = block->tensor.bytes;
  if (offset < 0 || static_cast<size_t>(offset) + size > bytes) {
    fail("a %s within the %zu bytes of argument %d (got bytes %lld to %lld)", access, bytes,
         block->tensor.argument, offset, offset + static_cast<long long>(size) - 1);
  }
  return *block;
}

[[noreturn]] void fail_of_race(const Block& block, size_t offset, unsigned other) {
  if (other == kSeveral) {
    fail("a write of byte %zu of argument %d by its only thread (got a race with several)", offset,
         block.tensor.argument);
  }
  fail("byte %zu of argument %d for one thread (got a race with lane %u of warp %u of the grid)",
       offset, block.tensor.argument, (other - 1) % kWarp, (other - 1) / kWarp);
}

[[noreturn]] void fail_of_alignment(const char* address, const char* file, unsigned line,
                                    unsigned alignment) {
  const Block* block = find(address);
  fail("a multiple of %u as the address at %s:%u (got byte %lld of argument %d)", alignment, file,
       line, block ? static_cast<long long>(address - block->begin) : 0ll,
       block ? block->tensor.argument : -1);
}

void on_read(const char* address, size_t size) {
  if (is_on_stack(address)) return;
  Block& block = check("read", address, size);
  const size_t first = address - block.begin;
  const unsigned me = running_thread() + 1;
  for (size_t i = first; i < first + size; ++i) {
    Byte& byte = block.bytes[i];
    if (byte.writer && byte.writer != me) fail_of_race(block, i, byte.writer);
    byte.reader = byte.reader && byte.reader != me ? kSeveral : me;
    if (block.tensor.written && !block.tensor.written[i]) {
      fail("a value in byte %zu of argument %d (got a read before any write)", i,
           block.tensor.argument);
    }
  }
}

void on_write(char* address, size_t size) {
  if (is_on_stack(address)) return;
  Block& block = check("write", address, size);
  const size_t first = address - block.begin;
  const unsigned me = running_thread() + 1;
  for (size_t i = first; i < first + size; ++i) {
    Byte& byte = block.bytes[i];
    if (byte.reader && byte.reader != me) fail_of_race(block, i, byte.reader);
    if (byte.writer && byte.writer != me) {
      pending.address = address;
      pending.before.assign(address, address + size);
    }
    byte.writer = me;
    if (block.tensor.written) block.tensor.written[i] = 1;
  }
}

}  // namespace

void settle() {
  if (pending.before.empty()) return;
  const bool same = std::equal(pending.before.begin(), pending.before.end(), pending.address);
  pending.before.clear();
  if (same) return;
  const Block& block = *find(pending.address);
  fail("writes of one value to byte %zu of argument %d (got several by several threads)",
       static_cast<size_t>(pending.address - block.begin), block.tensor.argument);
}

void move_in(Tensor* tensors, int count, uint64_t* arguments) {
  if (count > kMost) std::abort();
  std::sort(tensors, tensors + count,
            [](const Tensor& a, const Tensor& b) { return a.data < b.data; });
  blocks.clear();
  pending.before.clear();
  for (Tensor* tensor = tensors; tensor < tensors + count; ++tensor) {
    if (!blocks.empty() && tensor->data < blocks.back().tensor.data + blocks.back().tensor.bytes) {
      Tensor& before = blocks.back().tensor;
      const size_t end = tensor->data + tensor->bytes - before.data;
      before.bytes = std::max(before.bytes, end);
    } else {
      blocks.push_back({*tensor, nullptr, {}});
    }
  }
  size_t most = 0;
  for (const Block& block : blocks) most = std::max(most, block.tensor.bytes + 2 * kPage);
  reserve(most);
  for (size_t i = 0; i < blocks.size(); ++i) {
    Block& block = blocks[i];
    // In the middle of its room, at the same place of a page.
    const size_t place = reinterpret_cast<uintptr_t>(block.tensor.data) % kPage;
    block.begin = arena + i * room + room / 4 / kPage * kPage + place;
    block.bytes.resize(block.tensor.bytes);
    std::memcpy(block.begin, block.tensor.data, block.tensor.bytes);
  }
  for (Tensor* tensor = tensors; tensor < tensors + count; ++tensor) {
    for (const Block& block : blocks) {
      const size_t offset = tensor->data - block.tensor.data;
      if (offset < block.tensor.bytes) {
        arguments[tensor->argument] = reinterpret_cast<uintptr_t>(block.begin + offset);
      }
    }
  }
}

void move_out() {
  for (const Block& block : blocks) {
    std::memcpy(block.tensor.data, block.begin, block.tensor.bytes);
  }
}

}  // namespace simt

// What the compiler calls for -fsanitize=thread.
#define GACT_ACCESS(name, size, on)                    \
  extern "C" void __tsan_##name##size(void* address) { \
    simt::on(static_cast<char*>(address), size);       \
  }
#define GACT_ACCESSES(name, on) \
  GACT_ACCESS(name, 1, on)      \
  GACT_ACCESS(name, 2, on)      \
  GACT_ACCESS(name, 4, on)      \
  GACT_ACCESS(name, 8, on)      \
  GACT_ACCESS(name, 16, on)
GACT_ACCESSES(read, on_read)
GACT_ACCESSES(write, on_write)
GACT_ACCESSES(unaligned_read, on_read)
GACT_ACCESSES(unaligned_write, on_write)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* address, size_t size) {
  simt::on_read(static_cast<char*>(address), size);
}
void __tsan_write_range(void* address, size_t size) {
  simt::on_write(static_cast<char*>(address), size);
}

// What it calls for -fsanitize=alignment and =bounds, after a check that failed.
struct SourceLocation {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct TypeMismatch {
  SourceLocation place;
  const void* type;
  unsigned char log_of_alignment;
  unsigned char kind;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
  simt::fail_of_alignment(reinterpret_cast<char*>(address), data->place.file, data->place.line,
                          1u << data->log_of_alignment);
}
void __ubsan_handle_out_of_bounds(SourceLocation* place, uintptr_t index) {
  simt::fail("an index within an array at %s:%u (got %lld)", place->file, place->line,
             static_cast<long long>(index));
}
}
