// Memory for weights and KV in pages of 2 MiB where the system grants them: at one row a product
// reads 34 GB/s of weights in 4 KiB pages and 52 in large ones (Zen 4, 2 cores, November 2026).

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace lora_serve {

// Asks the system to back the whole large pages inside [address, address + bytes). Only a hint.
void use_huge_pages(void* address, size_t bytes);

struct FreeMemory {
  void operator()(void* memory) const;
};

using WordBuffer = std::unique_ptr<uint32_t[], FreeMemory>;

// 64-byte aligned, in large pages if it is at least one long. Throws std::bad_alloc.
WordBuffer allocate_words(size_t num_words);

using SharedWords = std::shared_ptr<uint32_t[]>;

// Words one after the other from chunks of many large pages, so that weights that are shorter than
// one, or end inside one, lie in large pages too. A chunk lives as long as any words from it; what
// was not taken of it was never touched and costs no memory.
class WordArena {
 public:
  // 64-byte aligned, uninitialised. Throws std::bad_alloc.
  SharedWords take(size_t num_words);

 private:
  SharedWords chunk_;
  size_t num_left_ = 0;
};

}  // namespace lora_serve
