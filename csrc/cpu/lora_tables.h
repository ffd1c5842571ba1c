// Adapters as tables of addresses, and which rows of a step use which of them: what lora.h reads.
//
// An adapter's linear layer holds one shrink matrix, the rows of all its parts' A one below the
// other, and one expand matrix per part. A part's rows start at a whole word of the hidden row, so
// that its own sum never touches a neighbour's hidden.

#pragma once

#include <cstddef>
#include <cstdint>

namespace lora_serve {

// y[:, out_start : + out_features] += scale * hidden[hidden_start : + rank] @ b.T
struct LoraPart {
  const uint32_t* b;  // packed (out_features, rank)
  size_t hidden_start, rank, out_start, out_features;
  float scale;
};

struct LoraLinear {
  const uint32_t* a;  // packed (hidden, in_features)
  size_t hidden;      // a multiple of 16; 0: the adapter leaves this layer alone
  const LoraPart* parts;
  size_t num_parts;
};

struct LoraSegment {
  size_t begin, end;  // rows
  const LoraLinear* linears;
};

struct LoraPlan {
  const LoraSegment* segments;
  size_t num_segments;
};

}  // namespace lora_serve
