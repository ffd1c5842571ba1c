// What the sampling kernel takes and gives. V entries in a row of logits.

#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "selection.h"

namespace lora_serve {

// How a token is chosen; without more, the first of the largest logits.
struct TokenChoice {
  float scale = 0;    // 1 / temperature, or 0: greedy
  float min_p = 0;    // 0: off
  double top_p = 1;   // 1: off
  int64_t top_k = 0;  // 0 or less: off
  uint64_t seed = 0;
  uint64_t position = 0;
};

// What one row is asked for. Its result depends on nothing else, and on no other row.
struct RowChoice : TokenChoice {
  int64_t given = -1;               // the token that stands there already, or -1: choose one
  int64_t num_top = -1;             // most likely tokens to list, or -1: no log-probabilities
  const RowEdits* edits = nullptr;  // or null
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
