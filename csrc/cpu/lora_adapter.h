// An adapter's packed weights, and the tables that lora.h reads. Immutable once made.

#pragma once

#include <vector>

#include "dtype.h"
#include "huge_pages.h"
#include "lora_tables.h"

namespace lora_serve {

// One projection as it comes: a (rank, in_features), b (out_features, rank), contiguous.
struct LoraPartSource {
  const void* a;
  const void* b;
  size_t rank, in_features, out_features, out_start;
  float scale;
};

class LoraAdapter {
 public:
  // parts[i]: those of linear layer i; all of one layer have its in_features.
  LoraAdapter(Dtype dtype, const std::vector<std::vector<LoraPartSource>>& parts);

  const LoraLinear* linears() const { return linears_.data(); }
  size_t num_linears() const { return linears_.size(); }
  size_t num_bytes() const { return num_words_ * sizeof(uint32_t); }

 private:
  std::vector<LoraLinear> linears_;
  std::vector<LoraPart> parts_;
  size_t num_words_ = 0;
  WordBuffer words_;
};

}  // namespace lora_serve
