// The experts of a mixture: which of them a row takes, their products, and what comes of them.
//
//   choose    the K largest of a row's E logits, and the softmax's values there
//   experts   y[p] = weight[e] x[p / K] + bias, where e = expert_ids[p]     P = T K pairs
//   combine   y[t] = sum over j of weights[t][j] * x[t K + j]
//   add_gated y[t] += x[t] / (1 + exp(-gate[t]))
//
// The rows of one expert are brought together and multiplied by the linear layers' own kernels,
// whose sums depend on no other row. A row's experts are summed in the order in which it chose
// them: the largest logit first, of equal ones the first.

#pragma once

#include <algorithm>
#include <cstring>

#include "activation.h"
#include "kernels.h"

namespace lora_serve::LORA_SERVE_PATH {

// Where a thread keeps one row's logits, and which of them are chosen already.
struct RouterRow {
  float* values;
  char* is_chosen;
};

static inline size_t router_row_bytes(size_t num_experts) {
  return round_up(num_experts, kLanes) * (sizeof(float) + sizeof(char));
}

// A NaN is chosen where it stands first, and never another index than those of [0, E).
static inline int32_t next_largest(const RouterRow& row, size_t num_experts) {
  size_t best = num_experts;
  for (size_t e = 0; e < num_experts; ++e) {
    if (row.is_chosen[e]) continue;
    if (best == num_experts || row.values[e] > row.values[best]) best = e;
  }
  row.is_chosen[best] = 1;
  return static_cast<int32_t>(best);
}

// exp(values[i] - largest) in place, for whole vectors.
static inline void exponentials(float* values, size_t size, float largest) {
  for (size_t i = 0; i < size; i += kLanes) {
    const F32x16 x = sub(load(values + i), broadcast(largest));
    store(values + i, exp2(mul(x, broadcast(kLog2E))));
  }
}

template <class T>
static void choose_row(const ChooseCall& call, size_t t, const RouterRow& row) {
  const size_t padded = round_up(call.num_experts, kLanes);
  for_each_vector(call.num_experts, [&](size_t e, auto n) {
    const T* logits = static_cast<const T*>(call.logits) + t * call.num_experts;
    store_lanes(row.values + e, load_lanes(logits + e, n), n);
  });
  std::fill(row.values + call.num_experts, row.values + padded, 0.0f);
  std::memset(row.is_chosen, 0, call.num_experts);
  int32_t* ids = call.expert_ids + t * call.num_chosen;
  for (size_t j = 0; j < call.num_chosen; ++j) ids[j] = next_largest(row, call.num_experts);
  exponentials(row.values, padded, row.values[ids[0]]);
  float total = 0;
  if (call.among_chosen) {
    for (size_t j = 0; j < call.num_chosen; ++j) total += row.values[ids[j]];
  } else {
    for (size_t e = 0; e < call.num_experts; ++e) total += row.values[e];
  }
  float* weights = call.weights + t * call.num_chosen;
  for (size_t j = 0; j < call.num_chosen; ++j) weights[j] = row.values[ids[j]] / total;
}

template <class T>
static void choose_of(const ChooseCall& call, Workers& workers) {
  const size_t padded = round_up(call.num_experts, kLanes);
  const Team team = workers.team(call.rows * padded * call.num_chosen >= kParallelElements);
  char* memory = static_cast<char*>(
      workers.scratch.take(team.num_threads * router_row_bytes(call.num_experts)));
  const size_t num_tasks = tasks_of_rows(team);
  for_each_task(team, num_tasks, [&](size_t task, int thread) {
    char* mine = memory + thread * router_row_bytes(call.num_experts);
    const RouterRow row{reinterpret_cast<float*>(mine), mine + padded * sizeof(float)};
    const Range rows = part_of(call.rows, num_tasks, task);
    for (size_t t = rows.begin; t < rows.end; ++t) choose_row<T>(call, t, row);
  });
}

// The pairs in the order of their experts, and of each expert in ascending order.
struct PairsByExpert {
  uint32_t* first;  // (experts + 1): expert e has [first[e], first[e + 1]) of `pairs`
  uint32_t* pairs;
};

static inline void sort_pairs(const ExpertsCall& call, const PairsByExpert& sorted) {
  std::fill_n(sorted.first, call.num_experts + 1, 0u);
  for (size_t p = 0; p < call.linear.rows; ++p) ++sorted.first[call.expert_ids[p] + 1];
  for (size_t e = 0; e < call.num_experts; ++e) sorted.first[e + 1] += sorted.first[e];
  for (size_t p = 0; p < call.linear.rows; ++p) {
    sorted.pairs[sorted.first[call.expert_ids[p]]++] = static_cast<uint32_t>(p);
  }
  // Each first has become the next one's.
  for (size_t e = call.num_experts; e > 0; --e) sorted.first[e] = sorted.first[e - 1];
  sorted.first[0] = 0;
}

// Copies rows of `bytes`, row i from from(i) to to(i).
template <class From, class To>
static void copy_rows(size_t num_rows, size_t bytes, Workers& workers, const From& from,
                      const To& to) {
  const Team team = workers.team(num_rows * bytes >= kParallelElements * sizeof(float));
  const size_t num_tasks = tasks_of_rows(team);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range rows = part_of(num_rows, num_tasks, task);
    for (size_t i = rows.begin; i < rows.end; ++i) std::memcpy(to(i), from(i), bytes);
  });
}

// multiply(expert, linear) is one expert's product of rows that lie together.
template <class Multiply>
static void multiply_experts(const ExpertsCall& call, Workers& workers, const Multiply& multiply) {
  const LinearCall& all = call.linear;
  const size_t element = element_bytes(all.dtype);
  const size_t x_bytes = all.in_features * element, y_bytes = all.out_features * element;
  const size_t ids_bytes = round_up((call.num_experts + 1 + all.rows) * sizeof(uint32_t), 64);
  const size_t gathered_bytes = round_up(all.rows * x_bytes, 64);
  char* memory = static_cast<char*>(
      workers.plan.take(ids_bytes + gathered_bytes + all.rows * y_bytes));
  uint32_t* ids = reinterpret_cast<uint32_t*>(memory);
  const PairsByExpert sorted{ids, ids + call.num_experts + 1};
  sort_pairs(call, sorted);
  char* x = memory + ids_bytes;
  char* y = x + gathered_bytes;
  copy_rows(
      all.rows, x_bytes, workers,
      [&](size_t i) {
        return static_cast<const char*>(all.x) + sorted.pairs[i] / call.pairs_per_row * x_bytes;
      },
      [&](size_t i) { return x + i * x_bytes; });
  for (size_t e = 0; e < call.num_experts; ++e) {
    const size_t begin = sorted.first[e], count = sorted.first[e + 1] - begin;
    if (count == 0) continue;
    multiply(call.experts[e],
             LinearCall{all.dtype, x + begin * x_bytes, call.experts[e].weight,
                        call.experts[e].bias, y + begin * y_bytes, count, all.in_features,
                        all.out_features});
  }
  copy_rows(
      all.rows, y_bytes, workers, [&](size_t i) { return y + i * y_bytes; },
      [&](size_t i) { return static_cast<char*>(all.y) + sorted.pairs[i] * y_bytes; });
}

template <class T>
static void combine_of(const CombineCall& call, Workers& workers) {
  const Team team = workers.team(call.rows * call.pairs_per_row * call.width >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  const size_t vectors = ceil_div(call.width, kLanes);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range range = part_of(call.rows * vectors, num_tasks, task);
    for (size_t i = range.begin; i < range.end; ++i) {
      const size_t t = i / vectors, d = i % vectors * kLanes;
      const T* x = static_cast<const T*>(call.x) + t * call.pairs_per_row * call.width + d;
      const float* weights = call.weights + t * call.pairs_per_row;
      T* y = static_cast<T*>(call.y) + t * call.width + d;
      const auto sum = [&](auto n) {
        F32x16 total = zero();
        for (size_t j = 0; j < call.pairs_per_row; ++j) {
          total = fma(load_lanes(x + j * call.width, n), broadcast(weights[j]), total);
        }
        store_lanes(y, total, n);
      };
      if (d + kLanes <= call.width) {
        sum(Count<kLanes>());
      } else {
        sum(static_cast<int>(call.width - d));
      }
    }
  });
}

template <class T>
static void add_gated_of(const GatedCall& call, Workers& workers) {
  const Team team = workers.team(call.rows * call.width >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range rows = part_of(call.rows, num_tasks, task);
    for (size_t t = rows.begin; t < rows.end; ++t) {
      float logits[kLanes];
      store(logits, load_first(static_cast<const T*>(call.gate) + t, 1));
      const F32x16 e = exp2(mul(broadcast(logits[0]), broadcast(-kLog2E)));
      const F32x16 gate = div(broadcast(1.0f), add(broadcast(1.0f), e));
      const T* x = static_cast<const T*>(call.x) + t * call.width;
      T* y = static_cast<T*>(call.y) + t * call.width;
      for_each_vector(call.width, [&](size_t d, auto n) {
        store_lanes(y + d, fma(load_lanes(x + d, n), gate, load_lanes(y + d, n)), n);
      });
    }
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
