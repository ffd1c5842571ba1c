// The next token of each row of logits, and log-probabilities; the specification is
// lora_serve/sampling/specification, and this gives its every bit.
//
// V entries in a row. w(i) = e^((row[i] - peak) scale), as a whole number of units of 2^-40: sums
// have no order, so a row may be cut into pieces at will. No operation contracts and no fma is
// used, because numpy has none. One row is one task.

#pragma once

#include <cstring>
#include <limits>

#include "parallel.h"
#include "sampling_call.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

constexpr size_t kChunk = 512;  // entries that pass through all stages before the next do
constexpr size_t kGroup = 64;   // entries of which only the largest is looked at first
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One row's work memory, a thread's own.
struct RowMemory {
  float* row;      // (V), logits as they are compared
  float* weights;  // (V)
  uint32_t* ids;   // (V)
  uint32_t* work;  // (V)
  int64_t* sums;   // one for each chunk

  RowMemory(char* at, size_t size) {
    const size_t bytes = round_up(size * sizeof(float), 64);
    row = reinterpret_cast<float*>(at);
    weights = reinterpret_cast<float*>(at + bytes);
    ids = reinterpret_cast<uint32_t*>(at + 2 * bytes);
    work = reinterpret_cast<uint32_t*>(at + 3 * bytes);
    sums = reinterpret_cast<int64_t*>(at + 4 * bytes);
  }
  static size_t bytes(size_t size) {
    return 4 * round_up(size * sizeof(float), 64) +
           round_up(ceil_div(size, kChunk) * sizeof(int64_t), 64);
  }
};

// run(begin, end) for each chunk of [0, size).
template <class Run>
static void for_each_chunk(size_t size, const Run& run) {
  for (size_t begin = 0; begin < size; begin += kChunk) {
    run(begin, size - begin < kChunk ? size : begin + kChunk);
  }
}

template <class T>
static void widen(const T* from, size_t n, float* to) {
  for_each_vector(n, [&](size_t i, auto lanes) {
    store_lanes(to + i, load_lanes(from + i, lanes), lanes);
  });
}

// NaN becomes -infinity, +infinity the largest number.
static void make_comparable(float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float number = x[i] > -kInfinity ? x[i] : -kInfinity;
    x[i] = number < kInfinity ? number : std::numeric_limits<float>::max();
  }
}

static float highest(const float* x, size_t n) {
  F32x16 best = broadcast(-kInfinity);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) best = at_least(load(x + i), best);
  float most = reduce_max(best);
  for (; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

static size_t first_equal(const float* x, float value) {
  size_t i = 0;
  while (x[i] != value) ++i;
  return i;
}

// The lowest id of the largest logit.
template <class T>
static size_t argmax(const T* logits, size_t size) {
  alignas(64) float chunk[kChunk];
  float best = -kInfinity;
  size_t best_begin = 0;
  for_each_chunk(size, [&](size_t begin, size_t end) {
    widen(logits + begin, end - begin, chunk);
    make_comparable(chunk, end - begin);
    const float here = highest(chunk, end - begin);
    if (here > best) {
      best = here;
      best_begin = begin;
    }
  });
  const size_t n = size - best_begin < kChunk ? size - best_begin : kChunk;
  widen(logits + best_begin, n, chunk);
  make_comparable(chunk, n);
  return best_begin + first_equal(chunk, best);
}

// Fills `row`, with the request's edits if there are any; returns its largest entry.
template <class T>
static float prepare_row(const T* logits, size_t size, const RowEdits* edits,
                         const RowMemory& memory) {
  if (edits != nullptr) {
    widen(logits, size, memory.row);
    apply_edits(*edits, memory.row, size, memory.work);
  }
  float peak = -kInfinity;
  for_each_chunk(size, [&](size_t begin, size_t end) {
    float* row = memory.row + begin;
    if (edits == nullptr) widen(logits + begin, end - begin, row);
    make_comparable(row, end - begin);
    const float here = highest(row, end - begin);
    peak = here > peak ? here : peak;
  });
  return peak;
}

// weights[i] = e^((row[i] - peak) scale); constants and order are those of sampling/weights.py.
static void weigh(const float* row, size_t n, float peak, float scale, float* weights) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (size_t i = 0; i < n; ++i) {
    float x = (row[i] - peak) * scale;
    x = x > -64.0f ? x : -64.0f;
    const float shifted = x * 1.44269504f + kShift;
    const float power = shifted - kShift;
    const float r = (x - power * 0.693359375f) - power * -2.12194442e-4f;
    float p = 1.38436409e-3f;
    p = p * r + 8.37416388e-3f;
    p = p * r + 4.16680016e-2f;
    p = p * r + 0.166664317f;
    p = p * r + 0.49999994f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(power) + 127) << 23;
    float factor;
    std::memcpy(&factor, &bits, sizeof factor);
    weights[i] = p * factor;
  }
}

// Adds up the weights that are not below `least`. Units are taken in two halves of 20 bits, of
// which a chunk's sum fits 32: before AVX-512 no vector makes 64-bit integers of floats.
static int64_t sum_of_units(const float* weights, size_t n, float least) {
  constexpr float kHalf = 1 << 20;
  int64_t sum = 0;
  for_each_chunk(n, [&](size_t begin, size_t end) {
    int32_t high_sum = 0, low_sum = 0;
    for (size_t i = begin; i < end; ++i) {
      const float halves = (weights[i] >= least ? weights[i] : 0.0f) * kHalf;
      const int32_t high = static_cast<int32_t>(halves);
      high_sum += high;
      low_sum += static_cast<int32_t>((halves - static_cast<float>(high)) * kHalf);
    }
    sum += (int64_t{high_sum} << 20) + low_sum;
  });
  return sum;
}

static int64_t sum_of_row(const float* row, size_t size, float peak, float scale, int64_t* sums) {
  alignas(64) float chunk[kChunk];
  int64_t total = 0;
  for_each_chunk(size, [&](size_t begin, size_t end) {
    weigh(row + begin, end - begin, peak, scale, chunk);
    sums[begin / kChunk] = sum_of_units(chunk, end - begin, 0);
    total += sums[begin / kChunk];
  });
  return total;
}

// Ids of the entries not below `floor`, ascending; returns how many.
static size_t gather_ids(const float* x, size_t size, float floor, uint32_t* ids) {
  size_t count = 0;
  for (size_t begin = 0; begin < size; begin += kGroup) {
    const size_t end = size - begin < kGroup ? size : begin + kGroup;
    if (!(highest(x + begin, end - begin) >= floor)) continue;
    for (size_t i = begin; i < end; ++i) {
      ids[count] = static_cast<uint32_t>(i);
      count += x[i] >= floor;
    }
  }
  return count;
}

// A value that k entries reach, and few more do: the k largest maxima of groups are k entries.
static float lower_bound_of_top(const float* row, size_t size, size_t k, float* work) {
  const size_t num_groups = size / kGroup;
  if (4 * k > num_groups) return -kInfinity;
  for (size_t g = 0; g < num_groups; ++g) work[g] = highest(row + g * kGroup, kGroup);
  return kth_largest(work, num_groups, k);
}

// Ids among which the k largest are, ascending, in memory.ids; returns how many. 1 <= k <= size.
static size_t gather_top(const RowMemory& memory, size_t size, size_t k) {
  const float floor = lower_bound_of_top(memory.row, size, k, memory.weights);
  return gather_ids(memory.row, size, floor, memory.ids);
}

// Ids of the k largest at the front of memory.ids, largest first. k <= size.
static void top_ids(const RowMemory& memory, size_t size, size_t k) {
  if (k == 0) return;
  select_largest(memory.row, memory.ids, gather_top(memory, size, k), k);
}

// Where the CDF of n weights passes `target`.
static size_t index_at(const float* weights, size_t n, int64_t target) {
  size_t i = 0;
  for (; i + 1 < n; ++i) {
    target -= units_of(weights[i]);
    if (target < 0) break;
  }
  return i;
}

static size_t draw_from_all(const TokenChoice& choice, size_t size, float peak, uint64_t random,
                            const RowMemory& memory) {
  const int64_t total = sum_of_row(memory.row, size, peak, choice.scale, memory.sums);
  int64_t target = cdf_target(total, random);
  size_t chunk = 0;
  for (; target >= memory.sums[chunk]; ++chunk) target -= memory.sums[chunk];
  const size_t begin = chunk * kChunk;
  const size_t n = size - begin < kChunk ? size - begin : kChunk;
  weigh(memory.row + begin, n, peak, choice.scale, memory.weights);
  return begin + index_at(memory.weights, n, target);
}

// The ids that top_k and min_p leave, without those that weigh too little to be in the nucleus:
// even all together, V of less than (total - limit) / V do not reach from the limit to the total.
static Candidates list_candidates(const TokenChoice& choice, size_t size, float peak,
                                  const RowMemory& memory, int64_t& limit) {
  const bool is_cut = choice.top_k > 0 && static_cast<uint64_t>(choice.top_k) < size;
  size_t n = size;
  if (is_cut) {
    n = static_cast<size_t>(choice.top_k);
    keep_largest(memory.row, memory.ids, gather_top(memory, size, n), n, memory.work);
    for (size_t i = 0; i < n; ++i) memory.weights[i] = memory.row[memory.ids[i]];
    weigh(memory.weights, n, peak, choice.scale, memory.weights);
  } else {
    weigh(memory.row, size, peak, choice.scale, memory.weights);
  }
  const int64_t total = sum_of_units(memory.weights, n, choice.min_p);
  limit = static_cast<int64_t>(choice.top_p * static_cast<double>(total));
  limit = limit < 1 ? 1 : limit;
  const double spare = static_cast<double>(total - limit) / static_cast<double>(size);
  const float least = static_cast<float>((spare < 1.01 ? 1.0 : spare * 0.99) / kUnit);
  const float floor = least > choice.min_p ? least : choice.min_p;

  uint32_t* positions = is_cut ? memory.work : memory.ids;
  const size_t kept = gather_ids(memory.weights, n, floor, positions);
  for (size_t i = 0; i < kept; ++i) {
    memory.weights[i] = memory.weights[positions[i]];
    if (is_cut) memory.ids[i] = memory.ids[positions[i]];
  }
  return {memory.ids, memory.weights, kept};
}

static size_t draw_filtered(const TokenChoice& choice, size_t size, float peak, uint64_t random,
                            const RowMemory& memory) {
  int64_t limit;
  Candidates left = list_candidates(choice, size, peak, memory, limit);
  if (choice.top_p < 1) keep_nucleus(left, limit, memory.work);
  const int64_t total = sum_of_units(left.weights, left.n, 0);
  return left.ids[index_at(left.weights, left.n, cdf_target(total, random))];
}

static size_t draw(const TokenChoice& choice, size_t size, float peak, const RowMemory& memory) {
  const uint64_t random = random_bits(choice.seed, choice.position);
  const bool is_filtered = choice.top_k > 0 || choice.min_p > 0 || choice.top_p < 1;
  return is_filtered ? draw_filtered(choice, size, peak, random, memory)
                     : draw_from_all(choice, size, peak, random, memory);
}

// A row of which a grammar allows at most one token in so many is drawn from these alone: the
// others would weigh nothing, and the order of those that are left is kept.
constexpr size_t kMostPickedShare = 4;
constexpr size_t kNoChoice = ~size_t{0};

template <class T>
static size_t choose_of_few(const T* logits, size_t size, const RowChoice& choice,
                            const RowMemory& memory) {
  uint32_t* const allowed = memory.ids + size / 2;  // behind what drawing from so few needs
  const RowEdits& edits = *choice.edits;
  const size_t most = size / kMostPickedShare;
  const size_t n = allowed_ids(edits.bitmask, edits.bitmask_size, size, most, allowed);
  if (n == 0 || n > most) return kNoChoice;
  T* const gathered = reinterpret_cast<T*>(memory.weights);
  for (size_t i = 0; i < n; ++i) gathered[i] = logits[allowed[i]];
  widen(gathered, n, memory.row);
  make_comparable(memory.row, n);
  const float peak = highest(memory.row, n);
  if (peak == -kInfinity) return kNoChoice;
  return allowed[choice.scale == 0 ? first_equal(memory.row, peak)
                                   : draw(choice, n, peak, memory)];
}

template <class T>
static size_t choose(const T* logits, size_t size, const RowChoice& choice,
                     const RowMemory& memory) {
  if (choice.scale == 0 && choice.edits == nullptr) return argmax(logits, size);
  if (choice.edits != nullptr && choice.edits->only_mask()) {
    const size_t token = choose_of_few(logits, size, choice, memory);
    if (token != kNoChoice) return token;
  }
  const float peak = prepare_row(logits, size, choice.edits, memory);
  if (choice.scale == 0 || peak == -kInfinity) return first_equal(memory.row, peak);
  return draw(choice, size, peak, memory);
}

static int64_t num_above(const float* row, size_t size, float value) {
  int64_t count = 0;
  for (size_t i = 0; i < size; ++i) count += row[i] > value;
  return count;
}

// Logprobs of the logits as they came, whatever the request changed.
template <class T>
static void tell_logprobs(const T* logits, size_t size, size_t num_top, const RowMemory& memory,
                          RowResult& result, TopEntry* top) {
  result.peak = prepare_row(logits, size, nullptr, memory);
  result.total = result.peak == -kInfinity
                     ? 0
                     : sum_of_row(memory.row, size, result.peak, 1, memory.sums);
  result.logit = memory.row[result.token];
  result.rank = 1 + num_above(memory.row, size, result.logit);
  result.num_top = num_top < size ? num_top : size;
  top_ids(memory, size, result.num_top);
  for (size_t i = 0; i < result.num_top; ++i) top[i] = {memory.ids[i], memory.row[memory.ids[i]]};
}

template <class T>
static void sample_of(const SampleCall& call, Workers& workers) {
  const size_t size = call.vocab_size;
  const Team team = workers.team(call.rows > 1);
  const size_t bytes = RowMemory::bytes(size);
  char* memories =
      static_cast<char*>(workers.scratch.take(static_cast<size_t>(team.num_threads) * bytes));
  for_each_task(team, call.rows, [&](size_t r, int thread) {
    const RowMemory memory(memories + static_cast<size_t>(thread) * bytes, size);
    const RowChoice& choice = call.choices[r];
    const T* logits = static_cast<const T*>(call.logits) + r * size;
    RowResult result{};
    result.token = choice.given >= 0
                       ? choice.given
                       : static_cast<int64_t>(choose(logits, size, choice, memory));
    if (choice.num_top >= 0) {
      tell_logprobs(logits, size, static_cast<size_t>(choice.num_top), memory, result,
                    call.top + r * call.most_top);
    }
    call.results[r] = result;
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
