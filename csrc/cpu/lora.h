// y[t] += scale * B @ (A @ x[t])   for every part of the adapter of t's segment
//
// T rows, R rank. Hidden rows A @ x[t] stay float; the delta is added to y in float and rounded
// once. Rows outside segments are never looked at. A row's sums are its own (product.h).

#pragma once

#include "blocks.h"
#include "kernels.h"
#include "left_rows.h"
#include "packing.h"
#include "tiles.h"

namespace lora_serve::LORA_SERVE_PATH {

// As in linear.h, for both phases together, since a second parallel region costs as much again.
constexpr size_t kParallelLoraBytes = 192 << 10;
constexpr size_t kRowsPerLoraTask = 8 * kMaxRows;
constexpr size_t kShrinkPanelsPerTask = kPair;
constexpr size_t kExpandPanelsPerTask = 64;

// Columns of y that are asked for before they are due: a block's rows lie far apart, and the
// columns that it adds to next are in none of its caches where there are many rows.
constexpr size_t kColumnsAhead = 64;

// Finds (segment, rows, item) of the n-th task, where each segment has `items(segment)` of them per
// chunk of rows.
struct LoraTask {
  size_t segment;
  Range rows;
  size_t item;
};

template <class Items>
static LoraTask find_task(const LoraPlan& plan, size_t task, const Items& items) {
  for (size_t s = 0;; ++s) {
    const LoraSegment& segment = plan.segments[s];
    const size_t rows = segment.end - segment.begin;
    const size_t chunks = ceil_div(rows, kRowsPerLoraTask);
    const size_t here = items(segment);
    if (task < chunks * here) {
      const Range part = part_of(rows, chunks, task / here);
      return {s, {segment.begin + part.begin, segment.begin + part.end}, task % here};
    }
    task -= chunks * here;
  }
}

template <class Items>
static size_t count_tasks(const LoraPlan& plan, const Items& items) {
  size_t count = 0;
  for (size_t s = 0; s < plan.num_segments; ++s) {
    const LoraSegment& segment = plan.segments[s];
    count += ceil_div(segment.end - segment.begin, kRowsPerLoraTask) * items(segment);
  }
  return count;
}

// The sizes of one call that both phases need.
struct LoraSizes {
  size_t words;   // along in_features
  size_t hidden;  // widest hidden row of any segment
  size_t bytes;   // of weights, times blocks of rows
  size_t first_row, end_row;
};

template <class T>
static LoraSizes lora_sizes(const LoraCall& call) {
  const LoraPlan& plan = *call.plan;
  LoraSizes sizes{words_along(call.in_features, sizeof(T)), 0, 0, 0, 0};
  for (size_t s = 0; s < plan.num_segments; ++s) {
    const LoraSegment& segment = plan.segments[s];
    const LoraLinear& layer = segment.linears[call.linear_index];
    if (layer.hidden == 0) continue;
    if (sizes.hidden == 0) sizes.first_row = segment.begin;
    sizes.end_row = segment.end;
    sizes.hidden = layer.hidden > sizes.hidden ? layer.hidden : sizes.hidden;
    size_t words = layer.hidden * sizes.words;
    for (size_t p = 0; p < layer.num_parts; ++p) {
      words += packed_words(layer.parts[p].out_features, layer.parts[p].rank, sizeof(T));
    }
    sizes.bytes += 4 * words * ceil_div(segment.end - segment.begin, kMaxRows);
  }
  return sizes;
}

template <class T>
static void shrink(const LoraCall& call, const LoraSizes& sizes, const T* x, float* hidden,
                   void* left_memory, Team team) {
  using Dot = typename DotFor<T>::Type;
  const size_t covered = sizes.end_row - sizes.first_row;
  const LeftRows<Dot> left = left_rows<Dot>(x, covered, call.in_features, left_memory, team);
  const auto items = [&](const LoraSegment& segment) {
    return ceil_div(segment.linears[call.linear_index].hidden, kLanes * kShrinkPanelsPerTask);
  };
  for_each_task(team, count_tasks(*call.plan, items), [&](size_t index, int) {
    const LoraTask task = find_task(*call.plan, index, items);
    const LoraLinear& layer = call.plan->segments[task.segment].linears[call.linear_index];
    const size_t first = task.item * kShrinkPanelsPerTask;
    const size_t last = first + kShrinkPanelsPerTask;
    const size_t panels = layer.hidden / kLanes;
    const Range rows{task.rows.begin - sizes.first_row, task.rows.end - sizes.first_row};
    const PanelProduct<Dot> product{left.data, left.stride, layer.a, panels, sizes.words};
    product_of(product, rows, {first, last < panels ? last : panels},
               [&](size_t row, size_t panel, const float* sums) {
                 store(hidden + row * sizes.hidden + panel * kLanes, load(sums));
               });
  });
}

template <class T>
SIMD_INLINE void add_delta(T* y, size_t left_over, F32x16 scale, F32x16 delta) {
  if (left_over >= kLanes) {
    store(y, fma(scale, delta, load(y)));
  } else {
    const int n = static_cast<int>(left_over);
    store_first(y, fma(scale, delta, load_first(y, n)), n);
  }
}

template <class T>
static void expand_part(const LoraCall& call, const LoraSizes& sizes, const LoraPart& part,
                        const float* hidden, Range rows, Range panels) {
  const F32x16 scale = broadcast(part.scale);
  T* y = static_cast<T*>(call.y) + part.out_start;
  const Range local{rows.begin - sizes.first_row, rows.end - sizes.first_row};
  const PanelProduct<WidenedDot<T>> product{hidden + part.hidden_start, sizes.hidden, part.b,
                                            ceil_div(part.out_features, kLanes),
                                            words_along(part.rank, sizeof(T))};
  // A block of rows at a time over all columns, so that y is walked along its rows.
  for_each_block(local, kMaxRows, [&](Range block) {
    product_of(product, block, panels, [&](size_t row, size_t panel, const float* sums) {
      const size_t column = panel * kLanes;
      T* at = y + (sizes.first_row + row) * call.out_features + column;
      __builtin_prefetch(at + kColumnsAhead, 1);
      add_delta(at, part.out_features - column, scale, load(sums));
    });
  });
}

template <class T>
static void expand(const LoraCall& call, const LoraSizes& sizes, const float* hidden, Team team) {
  const auto ranges = [](const LoraPart& part) {
    return ceil_div(part.out_features, kLanes * kExpandPanelsPerTask);
  };
  const auto items = [&](const LoraSegment& segment) {
    const LoraLinear& layer = segment.linears[call.linear_index];
    size_t count = 0;
    for (size_t p = 0; p < layer.num_parts; ++p) count += ranges(layer.parts[p]);
    return count;
  };
  for_each_task(team, count_tasks(*call.plan, items), [&](size_t index, int) {
    const LoraTask task = find_task(*call.plan, index, items);
    const LoraPart* part = call.plan->segments[task.segment].linears[call.linear_index].parts;
    size_t item = task.item;
    for (; item >= ranges(*part); ++part) item -= ranges(*part);
    const size_t panels = ceil_div(part->out_features, kLanes);
    const Range range = part_of_panels(panels, ranges(*part), item);
    expand_part<T>(call, sizes, *part, hidden, task.rows, range);
  });
}

template <class T>
static void lora_of(const LoraCall& call, Workers& workers) {
  using Dot = typename DotFor<T>::Type;
  const LoraSizes sizes = lora_sizes<T>(call);
  if (sizes.hidden == 0) return;
  const Team team = workers.team(sizes.bytes >= kParallelLoraBytes);
  const size_t covered = sizes.end_row - sizes.first_row;
  const size_t hidden_bytes = covered * sizes.hidden * sizeof(float);
  char* memory = static_cast<char*>(
      workers.scratch.take(hidden_bytes + left_bytes<Dot, T>(covered, call.in_features)));
  float* hidden = reinterpret_cast<float*>(memory);
  const T* x = static_cast<const T*>(call.x) + sizes.first_row * call.in_features;
  shrink<T>(call, sizes, x, hidden, memory + hidden_bytes, team);
  expand<T>(call, sizes, hidden, team);
}

}  // namespace lora_serve::LORA_SERVE_PATH
