// y[t] = weight[ids[t]]        T rows, bytes as they are: the same on every path

#pragma once

#include <cstddef>
#include <cstdint>

#include "workers.h"

namespace lora_serve {

// weight (vocab_size, row_bytes), ids (rows), y (rows, row_bytes).
struct EmbedCall {
  const void* weight;
  const int64_t* ids;
  void* y;
  size_t rows, row_bytes, vocab_size;
};

// Throws std::out_of_range for an id that the weight has no row for.
void embed(const EmbedCall& call, Workers& workers);

}  // namespace lora_serve
