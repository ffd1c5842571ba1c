// Where a token's key and value lie in one layer's cache.
//
// A block is K then V; each is (kv head, group, 16 head_size elements); a group is 16 tokens. With
// D head_size and words as in dtype.h:
//
//   K group: words (D / kPerWord, 16 tokens)       V group: words (16 / kPerWord, D)
//
// so that a register holds 16 tokens' keys when scores are summed over D, and 16 channels of values
// when the output is summed over tokens. block_size and D are multiples of 16.

#pragma once

#include "kernels.h"

namespace lora_serve::LORA_SERVE_PATH {

// In elements.
struct KvLayout {
  size_t head_size, group, head, side, block;

  explicit KvLayout(const KvShape& shape)
      : head_size(shape.head_size),
        group(kLanes * shape.head_size),
        head(shape.block_size * shape.head_size),
        side(head * shape.num_kv_heads),
        block(2 * side) {}
};

}  // namespace lora_serve::LORA_SERVE_PATH
