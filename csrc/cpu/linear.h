// y[t][n] = sum over k of x[t][k] * weight[n][k] + bias[n]
//
// T rows, N out_features, K in_features. Sums in float over ascending k, the bias added in float,
// one rounding to y's type. Nothing depends on T.

#pragma once

#include "blocks.h"
#include "kernels.h"
#include "left_rows.h"
#include "packing.h"
#include "tile_blocks.h"

namespace lora_serve::LORA_SERVE_PATH {

// Below this many bytes of weights times blocks of rows one thread is done before a second one has
// woken. Zen 4, 2 cores, November 2026: 64 KiB take 2 us, waking a spinning thread 1 to 2.
constexpr size_t kParallelBytes = 128 << 10;

// Rows that share a pass over the weights: as many as half of the L2 cache holds, so that weights
// are read from memory once per chunk and activations once per panel from L2.
constexpr size_t kChunkBytes = 512 << 10;

template <class Dot>
static size_t rows_per_chunk(size_t row_elements) {
  // Tiles multiply so fast that more rows must share a pass; CPUs that have them have 2 MiB of L2.
  constexpr size_t kBytes = kInTiles<Dot> ? 2 * kChunkBytes : kChunkBytes;
  const size_t fit = kBytes / (row_elements * sizeof(typename Dot::Left));
  const size_t least = 8 * kMaxRows;
  return round_up(fit > least ? fit : least, kMaxRows);
}

template <class T>
static void finish_linear(const LinearCall& call, size_t row, size_t panel, const float* sums) {
  const size_t column = panel * kLanes;
  T* y = static_cast<T*>(call.y) + row * call.out_features + column;
  const T* bias = static_cast<const T*>(call.bias);
  F32x16 sum = load(sums);
  if (column + kLanes <= call.out_features) {
    if (bias != nullptr) sum = add(sum, load(bias + column));
    store(y, sum);
  } else {
    const int n = static_cast<int>(call.out_features - column);
    if (bias != nullptr) sum = add(sum, load_first(bias + column, n));
    store_first(y, sum, n);
  }
}

// What becomes of the sums of one product.
template <class T>
struct FinishLinear {
  static constexpr size_t kProducts = 1;
  const LinearCall& call;

  void panel(size_t, size_t row, size_t panel, const float* sums) const {
    finish_linear<T>(call, row, panel, sums);
  }

#ifdef __AMX_BF16__
  // Asks for the rows of y that a block will write to: nothing else has read them before.
  void prepare(size_t row, size_t panel) const {
    const T* y = static_cast<const T*>(call.y) + row * call.out_features + panel * kLanes;
    for (size_t r = 0; r < kRowsOfBlock; ++r) __builtin_prefetch(y + r * call.out_features, 1);
  }

  void block(size_t row, size_t panel, const float* sums) const {
    const size_t column = panel * kLanes, width = call.out_features;
    if (column + kSumsOfRow > width) {
      for (size_t i = 0; i < kPair * kRowsOfBlock; ++i) {
        finish_linear<T>(call, row + i / kPair, panel + i % kPair, sums + i * kLanes);
      }
      return;
    }
    T* y = static_cast<T*>(call.y) + row * width + column;
    const T* bias = static_cast<const T*>(call.bias);
    const bool has_bias = bias != nullptr;
    const F32x16 left = has_bias ? load(bias + column) : zero();
    const F32x16 right = has_bias ? load(bias + column + kLanes) : zero();
    for (size_t r = 0; r < kRowsOfBlock; ++r, y += width, sums += kSumsOfRow) {
      const F32x16 first = load(sums), second = load(sums + kLanes);
      store(y, has_bias ? add(first, left) : first);
      store(y + kLanes, has_bias ? add(second, right) : second);
    }
  }
#endif
};

#ifdef __AMX_BF16__

template <class Finish>
static void products_in_blocks(size_t rows, const PanelProduct<Bfloat16Tiles>& product, Team team,
                               Workers& workers, const Finish& finish) {
  const BlockTasks tasks(rows, product.num_panels, product.num_words, team);
  const size_t floats = Finish::kProducts * tasks.waiting_sums();
  const size_t bytes = static_cast<size_t>(team.num_threads) * floats * sizeof(float);
  float* waiting = floats == 0 ? nullptr : static_cast<float*>(workers.scratch.take(bytes));
  for_each_task(team, tasks.count(), [&](size_t task, int thread) {
    float* own = floats == 0 ? nullptr : waiting + static_cast<size_t>(thread) * floats;
    product_of_task(product, tasks, task, own, finish);
  });
}

#endif

// Finish::kProducts products of the same rows, of call.out_features each; their weights lie one
// behind another.
template <class T, class Finish>
static void multiply_rows(const LinearCall& call, Workers& workers, const Finish& finish) {
  using Dot = typename DotFor<T>::Type;
  const size_t words = words_along(call.in_features, sizeof(T));
  const size_t panels = ceil_div(call.out_features, kLanes);
  const size_t row_blocks = ceil_div(call.rows, kMaxRows);
  const size_t weight_bytes = Finish::kProducts * panels * words * kLanes * sizeof(uint32_t);
  const Team team = workers.team(weight_bytes * row_blocks >= kParallelBytes);

  const size_t left_size = left_bytes<Dot, T>(call.rows, call.in_features);
  void* memory = workers.scratch.take(left_size);
  const LeftRows<Dot> left =
      left_rows<Dot>(static_cast<const T*>(call.x), call.rows, call.in_features, memory, team);

  const PanelProduct<Dot> product{left.data, left.stride, call.weight, panels, words};

#ifdef __AMX_BF16__
  if constexpr (kInTiles<Dot>) {
    const bool has_blocks = left_size == 0 && has_tile_blocks(call.rows, words);
    if (has_blocks) return products_in_blocks(call.rows, product, team, workers, finish);
  }
#endif

  const size_t chunk = rows_per_chunk<Dot>(left.stride);
  const size_t num_chunks = ceil_div(call.rows, chunk);
  const size_t pairs = ceil_div(panels, kPair);
  const size_t wanted = team.num_threads == 1 ? 1 : static_cast<size_t>(team.num_threads) * 32;
  const size_t ranges = wanted < pairs ? wanted : pairs;

  for_each_task(team, num_chunks * ranges, [&](size_t task, int) {
    const Range rows = part_of(call.rows, num_chunks, task / ranges);
    const Range columns = part_of_panels(panels, ranges, task % ranges);
    products_of(product, rows, columns, finish);
  });
}

template <class T>
static void linear_of(const LinearCall& call, Workers& workers) {
  multiply_rows<T>(call, workers, FinishLinear<T>{call});
}

}  // namespace lora_serve::LORA_SERVE_PATH
