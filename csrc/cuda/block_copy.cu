#include "block_copy.h"

namespace lora_serve {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // words each thread asks for before it uses the first: a bus is far

// One program copies one block of one layer, 16 bytes a thread at a time.
template <bool kGather>
__global__ void __launch_bounds__(kThreads) copy_block(BlockCopy copy) {
  const size_t block = blockIdx.x, layer = blockIdx.y;
  const size_t words = copy.block_bytes / sizeof(uint4);
  uint4* cache = reinterpret_cast<uint4*>(copy.layers[layer]) + copy.block_ids[block] * words;
  uint4* row = static_cast<uint4*>(copy.rows) + (block * copy.num_layers + layer) * words;
  const uint4* source = kGather ? cache : row;
  uint4* target = kGather ? row : cache;
  for (size_t first = threadIdx.x; first < words; first += kInFlight * kThreads) {
    uint4 values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const size_t word = first + i * kThreads;
      if (word < words) values[i] = source[word];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const size_t word = first + i * kThreads;
      if (word < words) target[word] = values[i];
    }
  }
}

template <bool kGather>
cudaError_t launch(const BlockCopy& copy, cudaStream_t stream) {
  if (copy.num_blocks == 0 || copy.num_layers == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(copy.num_blocks), static_cast<unsigned>(copy.num_layers));
  copy_block<kGather><<<grid, kThreads, 0, stream>>>(copy);
  return cudaGetLastError();
}

}  // namespace

cudaError_t gather_blocks(const BlockCopy& copy, cudaStream_t stream) {
  return launch<true>(copy, stream);
}

cudaError_t scatter_blocks(const BlockCopy& copy, cudaStream_t stream) {
  return launch<false>(copy, stream);
}

}  // namespace lora_serve
