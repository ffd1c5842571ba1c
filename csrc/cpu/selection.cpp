#include "selection.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace lora_serve {
namespace {

bool is_known(int64_t id, size_t size) { return id >= 0 && static_cast<size_t>(id) < size; }

void count(RowEdits::Ids ids, size_t size, uint32_t* counts) {
  for (size_t i = 0; i < ids.size; ++i) {
    if (is_known(ids.data[i], size)) ++counts[ids.data[i]];
  }
}

// Calls change(id, count) once for each id counted, and forgets its count.
template <class Change>
void for_each_counted(RowEdits::Ids ids, size_t size, uint32_t* counts, const Change& change) {
  for (size_t i = 0; i < ids.size; ++i) {
    if (!is_known(ids.data[i], size) || counts[ids.data[i]] == 0) continue;
    change(ids.data[i], counts[ids.data[i]]);
    counts[ids.data[i]] = 0;
  }
}

void penalize(const RowEdits& edits, float* row, size_t size, uint32_t* counts) {
  std::memset(counts, 0, size * sizeof(uint32_t));
  if (edits.repetition != 1.0f) {
    const auto repeat = [&](int64_t id, uint32_t) {
      row[id] = row[id] > 0 ? row[id] / edits.repetition : row[id] * edits.repetition;
    };
    count(edits.prompt, size, counts);
    count(edits.output, size, counts);
    for_each_counted(edits.prompt, size, counts, repeat);
    for_each_counted(edits.output, size, counts, repeat);
  }
  count(edits.output, size, counts);
  for_each_counted(edits.output, size, counts, [&](int64_t id, uint32_t times) {
    row[id] -= edits.frequency * static_cast<float>(times);
    row[id] -= edits.presence;
  });
}

void keep_allowed(const uint8_t* bitmask, size_t bitmask_size, float* row, size_t size) {
  for (size_t begin = 0; begin < size; begin += 8) {
    const uint8_t allowed = begin / 8 < bitmask_size ? bitmask[begin / 8] : 0;
    if (allowed == 0xff) continue;
    const size_t end = std::min(begin + 8, size);
    if (allowed == 0) {
      std::fill(row + begin, row + end, -std::numeric_limits<float>::infinity());
      continue;
    }
    for (size_t id = begin; id < end; ++id) {  // a choice of values, not a branch to be guessed
      const float banned = -std::numeric_limits<float>::infinity();
      row[id] = allowed >> (id - begin) & 1 ? row[id] : banned;
    }
  }
}

// Bits of floats that are not negative order like the floats.
uint32_t bits_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float weight;
  std::memcpy(&weight, &bits, sizeof weight);
  return weight;
}

// These order like all floats; those of -0 and 0 are equal.
uint32_t ordered_bits_of(float number) {
  constexpr uint32_t kSign = uint32_t{1} << 31;
  const uint32_t bits = bits_of(number + 0.0f);
  return bits & kSign ? ~bits : bits | kSign;
}

// Where the largest end that are kept: all of more bits are, and `num_equal` of just these bits.
struct Cut {
  uint32_t bits;
  size_t num_equal;

  // Whether the next entry is kept, in ascending order of ids.
  bool keeps(uint32_t other) {
    const bool is_last = other == bits && num_equal > 0;
    num_equal -= is_last;
    return other > bits || is_last;
  }
};

// Where the largest n bits reach `limit`, if what each holds is added up. Fixes the bits from the
// highest down, 11 at a time: a histogram over those that agree in all bits fixed so far tells in
// which bin the limit is reached. Does not keep `work`.
template <class Held>
Cut find_cut(uint32_t* work, size_t n, int64_t limit, const Held& held_by) {
  constexpr int kShifts[] = {21, 10, 0};
  constexpr size_t kBins = 2048;
  uint32_t fixed = 0;
  for (const int shift : kShifts) {
    int64_t held[kBins] = {};
    const uint32_t mask = shift == 0 ? 1023 : kBins - 1;
    for (size_t i = 0; i < n; ++i) held[work[i] >> shift & mask] += held_by(work[i]);
    uint32_t bin = mask;
    for (; held[bin] < limit; --bin) limit -= held[bin];
    size_t in_bin = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits = work[i];  // without a branch, which could not be predicted
      work[in_bin] = bits;
      in_bin += (bits >> shift & mask) == bin;
    }
    n = in_bin;
    fixed |= bin << shift;
  }
  const int64_t each = held_by(fixed);
  return {fixed, static_cast<size_t>((limit + each - 1) / each)};
}

}  // namespace

size_t allowed_ids(const uint8_t* bitmask, size_t bitmask_size, size_t size, size_t most,
                   uint32_t* ids) {
  size_t count = 0;
  const size_t end = std::min(bitmask_size, (size + 7) / 8);
  for (size_t byte = 0; byte < end; ++byte) {
    if (byte + 8 <= end) {
      uint64_t eight;
      std::memcpy(&eight, bitmask + byte, sizeof eight);
      if (eight == 0) {
        byte += 7;
        continue;
      }
    }
    for (unsigned bits = bitmask[byte]; bits != 0; bits &= bits - 1) {
      const size_t id = byte * 8 + static_cast<size_t>(__builtin_ctz(bits));
      if (id >= size) break;
      if (count == most) return most + 1;
      ids[count++] = static_cast<uint32_t>(id);
    }
  }
  return count;
}

void apply_edits(const RowEdits& edits, float* row, size_t size, uint32_t* counts) {
  if (edits.bitmask != nullptr) keep_allowed(edits.bitmask, edits.bitmask_size, row, size);
  for (size_t i = 0; i < edits.banned.size; ++i) {
    const int64_t id = edits.banned.data[i];
    if (is_known(id, size)) row[id] = -std::numeric_limits<float>::infinity();
  }
  for (size_t i = 0; i < edits.biased.size; ++i) {
    const int64_t id = edits.biased.data[i];
    if (is_known(id, size)) row[id] += edits.biases[i];
  }
  if (edits.has_penalties) penalize(edits, row, size, counts);
}

float kth_largest(float* values, size_t n, size_t k) {
  std::nth_element(values, values + k - 1, values + n, [](float a, float b) { return a > b; });
  return values[k - 1];
}

void select_largest(const float* row, uint32_t* ids, size_t n, size_t k) {
  const auto goes_first = [row](uint32_t a, uint32_t b) {
    return row[a] != row[b] ? row[a] > row[b] : a < b;
  };
  if (k < n) std::nth_element(ids, ids + k, ids + n, goes_first);
  std::sort(ids, ids + k, goes_first);
}

void keep_largest(const float* row, uint32_t* ids, size_t n, size_t k, uint32_t* work) {
  if (k == n) return;
  for (size_t i = 0; i < n; ++i) work[i] = ordered_bits_of(row[ids[i]]);
  Cut cut = find_cut(work, n, static_cast<int64_t>(k), [](uint32_t) { return int64_t{1}; });
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    const bool is_kept = cut.keeps(ordered_bits_of(row[ids[i]]));
    ids[kept] = ids[i];
    kept += is_kept;
  }
}

void keep_nucleus(Candidates& candidates, int64_t limit, uint32_t* work) {
  for (size_t i = 0; i < candidates.n; ++i) work[i] = bits_of(candidates.weights[i]);
  Cut cut = find_cut(work, candidates.n, limit,
                     [](uint32_t bits) { return units_of(float_of(bits)); });
  size_t kept = 0;
  for (size_t i = 0; i < candidates.n; ++i) {
    const bool is_kept = cut.keeps(bits_of(candidates.weights[i]));
    candidates.ids[kept] = candidates.ids[i];
    candidates.weights[kept] = candidates.weights[i];
    kept += is_kept;
  }
  candidates.n = kept;
}

// Salmon et al. 2011, as lora_serve/sampling/specification/philox.py has it.
uint64_t random_bits(uint64_t seed, uint64_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32);
  uint32_t c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return (uint64_t{c1} << 32 | c0) >> 11;
}

int64_t cdf_target(int64_t total, uint64_t random) {
  const unsigned __int128 product = static_cast<unsigned __int128>(total) * random;
  return static_cast<int64_t>(product >> 53);
}

}  // namespace lora_serve
