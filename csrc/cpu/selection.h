// The parts of sampling that walk lists of ids, not vectors: compiled once, for any machine.
//
// Order is by value, then by lowest id. Units are whole numbers (weights.py in
// lora_serve/sampling/specification), so a sum of them is the same in any order. No function here
// looks at a NaN: there is none left.

#pragma once

#include <cstddef>
#include <cstdint>

namespace lora_serve {

constexpr int64_t kUnit = int64_t{1} << 40;

static inline int64_t units_of(float weight) {
  return static_cast<int64_t>(weight * static_cast<float>(kUnit));
}

// What a request changes in its logits, see lora_serve/sampling/specification/adjust.py. Ids
// outside the vocabulary change nothing.
struct RowEdits {
  struct Ids {
    const int64_t* data;
    size_t size;
  };
  Ids banned, biased, prompt, output;
  // Whether nothing but the bitmask changes anything.
  bool only_mask() const {
    return bitmask != nullptr && banned.size == 0 && biased.size == 0 && !has_penalties;
  }
  const float* biases;  // one for each of `biased`
  float repetition, frequency, presence;
  bool has_penalties;
  // Allows token i by bit i % 8 of byte i / 8, and none behind its last byte; null allows all.
  const uint8_t* bitmask;
  size_t bitmask_size;
};

// Ids that a bitmask allows, ascending; returns how many, or more than `most`, which are not all.
size_t allowed_ids(const uint8_t* bitmask, size_t bitmask_size, size_t size, size_t most,
                   uint32_t* ids);

// counts: (size), work memory.
void apply_edits(const RowEdits& edits, float* row, size_t size, uint32_t* counts);

// The k-th largest of n values, whose order is not kept. 1 <= k <= n.
float kth_largest(float* values, size_t n, size_t k);

// Moves the ids of the k largest of n to the front, largest first. k <= n.
void select_largest(const float* row, uint32_t* ids, size_t n, size_t k);

// Drops all but the k largest of n ids, which are ascending and stay so. 1 <= k <= n. work: (n).
void keep_largest(const float* row, uint32_t* ids, size_t n, size_t k, uint32_t* work);

// A distribution over n ids in ascending order: weight[i] is that of ids[i].
struct Candidates {
  uint32_t* ids;
  float* weights;
  size_t n;
};

// Drops all but the fewest of the most likely that together hold `limit` units. work: (n).
void keep_nucleus(Candidates& candidates, int64_t limit, uint32_t* work);

// A number in [0, 2^53) that (seed, position) alone decides: Philox4x32-10.
uint64_t random_bits(uint64_t seed, uint64_t position);

// floor(total * random / 2^53)
int64_t cdf_target(int64_t total, uint64_t random);

}  // namespace lora_serve
