#include "huge_pages.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "dtype.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace lora_serve {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunkWords = 32 * kHugePage / sizeof(uint32_t);
constexpr size_t kAlignmentWords = 64 / sizeof(uint32_t);

}  // namespace

void use_huge_pages(void* address, size_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t begin = (at + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (at + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)address;
  (void)bytes;
#endif
}

void FreeMemory::operator()(void* memory) const { std::free(memory); }

WordBuffer allocate_words(size_t num_words) {
  const size_t bytes = num_words * sizeof(uint32_t);
  const size_t alignment = bytes < kHugePage ? 64 : kHugePage;
  void* memory = std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  use_huge_pages(memory, bytes);
  return WordBuffer(static_cast<uint32_t*>(memory));
}

SharedWords WordArena::take(size_t num_words) {
  if (num_words > kChunkWords) return SharedWords(allocate_words(num_words));
  if (num_words > num_left_) {
    chunk_ = allocate_words(kChunkWords);
    num_left_ = kChunkWords;
  }
  SharedWords taken(chunk_, chunk_.get() + (kChunkWords - num_left_));
  num_left_ -= std::min(num_left_, round_up(num_words, kAlignmentWords));
  return taken;
}

}  // namespace lora_serve
