// KV blocks of all layers to rows of bytes and back, in one launch each.
//
//   gather:  rows[n, l, :] = layers[l][block_ids[n], :]
//   scatter: layers[l][block_ids[n], :] = rows[n, l, :]
//
// N blocks, L layers, B bytes of one block in one layer, a multiple of 16.
// layers (L) addresses, on the device; each of them and rows aligned to 16.
// block_ids (N) int32, on the device; for scatter no two are equal.
// rows (N, L, B) in device memory, or in pinned host memory, which the kernel reaches over the bus
// itself: no staging copy, and one launch instead of a copy for each block and layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace lora_serve {

struct BlockCopy {
  const uint64_t* layers;
  const int32_t* block_ids;
  void* rows;
  size_t num_layers;
  size_t num_blocks;
  size_t block_bytes;
};

// Both return at once; the work is ordered on the stream.
cudaError_t gather_blocks(const BlockCopy& copy, cudaStream_t stream);
cudaError_t scatter_blocks(const BlockCopy& copy, cudaStream_t stream);

}  // namespace lora_serve
