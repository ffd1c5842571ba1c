// Python's view of the CUDA kernels: raw addresses, sizes and a stream, no tensors.
//
// The caller (lora_serve/ops/block_rows.py) vouches for every address and size.

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "block_copy.h"

namespace nb = nanobind;

namespace lora_serve {
namespace {

using Address = uintptr_t;

template <cudaError_t (*kCopy)(const BlockCopy&, cudaStream_t)>
void copy_blocks(Address layers, size_t num_layers, Address block_ids, size_t num_blocks,
                 Address rows, size_t block_bytes, Address stream) {
  const BlockCopy copy{reinterpret_cast<const uint64_t*>(layers),
                       reinterpret_cast<const int32_t*>(block_ids),
                       reinterpret_cast<void*>(rows),
                       num_layers,
                       num_blocks,
                       block_bytes};
  const cudaError_t error = kCopy(copy, reinterpret_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("copying KV blocks: ") + cudaGetErrorString(error));
  }
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("gather_blocks", &copy_blocks<gather_blocks>);
  m.def("scatter_blocks", &copy_blocks<scatter_blocks>);
}

}  // namespace lora_serve
