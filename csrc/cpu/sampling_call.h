// What the sampling kernel takes and gives. V entries in a row of logits.

#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "selection.h"

namespace lora_serve {

// What one row is asked for. Its result depends on nothing else, and on no other row.
struct RowChoice {
  int64_t given;   // the token that stands there already, or -1: choose one
  float scale;     // 1 / temperature, or 0: greedy
  float min_p;     // 0: off
  double top_p;    // 1: off
  int64_t top_k;   // 0 or less: off
  uint64_t seed;
  uint64_t position;
  int64_t num_top;        // most likely tokens to list, or -1: no log-probabilities
  const RowEdits* edits;  // or null
};

// With log-probabilities: total is the sum of all weights relative to peak's, in units.
struct RowResult {
  int64_t token;
  float logit, peak;
  int64_t total, rank;
  size_t num_top;  // how many were listed: V at most
};

struct TopEntry {
  uint32_t token;
  float logit;
};

struct SampleCall {
  Dtype dtype;
  const void* logits;  // (rows, vocab_size), contiguous
  size_t rows, vocab_size;
  const RowChoice* choices;  // (rows)
  RowResult* results;        // (rows)
  TopEntry* top;             // (rows, most_top), most likely first
  size_t most_top;
};

}  // namespace lora_serve
