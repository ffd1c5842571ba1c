// A unit of attention: a block of one request's queries times one kv head, walked span by span.
//
// Its rows are tokens times the heads that share the kv head, token by token. Every span leaves
// (max, sum, out) per row; `fold` merges them in ascending order. A unit may be walked by several
// tasks, a span each: the spans' results and the order of merging are the same.

#pragma once

#include "attention_amx.h"
#include "attention_tile.h"
#include "kernels.h"
#include "left_rows.h"

namespace lora_serve::LORA_SERVE_PATH {

// Long enough that merging is lost in the noise, short enough that one request of 4k tokens with
// two kv heads keeps 16 threads busy. Part of the numerics: another value gives other bits.
constexpr int64_t kSpan = 8 * kTile;

// Up to so many rows a tile is worked off before the memory has brought the next one, so that one
// is asked for ahead. Zen 4, 1 core, November 2026, 32k positions: 1.44 ms without, 0.97 ms with.
constexpr size_t kPrefetchRows = 16;

struct AttentionUnit {
  size_t request, kv_head;
  size_t first_token, num_tokens;  // rows of q
  int64_t first_position;
  size_t first_partial;  // where those of the unit's spans begin, when tasks walk them one by one
  size_t shared_spans;   // the first ones, which are walked with other units' (attention_sharing.h)
  bool split;
};

// Softmax of a unit's rows over some spans: out is not yet divided by sum.
struct AttentionPartial {
  float* max;  // (rows)
  float* sum;  // (rows)
  float* out;  // (rows, D)
};

// What all units of a call share.
template <class T>
struct AttentionSetup {
  const AttentionCall* call;
  KvLayout layout;
  size_t heads;     // that share a kv head
  size_t max_rows;  // of a unit
  LogitScale scale;

  Visible visible(int64_t position) const {
    const int64_t begin = call->window > 0 ? position - call->window + 1 : 0;
    return {begin < 0 ? 0 : begin, position + 1};
  }
  Visible visible_to(const AttentionUnit& unit) const {
    const int64_t last = unit.first_position + static_cast<int64_t>(unit.num_tokens) - 1;
    return {visible(unit.first_position).begin, last + 1};
  }
  int64_t first_span(const AttentionUnit& unit) const { return visible_to(unit).begin / kSpan; }
  int64_t num_spans(const AttentionUnit& unit) const {
    return (visible_to(unit).end + kSpan - 1) / kSpan - first_span(unit);
  }
  size_t partial_floats(size_t rows) const { return rows * (layout.head_size + 2); }
  AttentionPartial partial_at(float* memory, size_t rows) const {
    return {memory, memory + rows, memory + 2 * rows};
  }
  // That of one span of a unit, its `index`-th.
  AttentionPartial partial_of(const AttentionUnit& unit, size_t index, float* partials) const {
    const size_t rows = unit.num_tokens * heads;
    return partial_at(partials + unit.first_partial + index * partial_floats(rows), rows);
  }
};

// A thread's own memory.
template <class T>
struct AttentionMemory {
  using Dot = typename DotFor<T>::Type;
  using Left = typename Dot::Left;
  TileState<Dot> state;
  AttentionPartial merged;

  static size_t bytes(const AttentionSetup<T>& setup) {
    const size_t row_floats = 2 * setup.layout.head_size + 2 * kTile + kLanes + 2;
    return round_up(
        (setup.max_rows * row_floats + setup.partial_floats(setup.max_rows)) * sizeof(float), 64);
  }

  // Four bytes an element throughout, whatever Left is.
  AttentionMemory(const AttentionSetup<T>& setup, char* memory) {
    float* next = reinterpret_cast<float*>(memory);
    const auto take = [&](size_t per_row) {
      float* const taken = next;
      next += setup.max_rows * per_row;
      return taken;
    };
    state.head_size = setup.layout.head_size;
    state.scores = take(kTile);
    state.sums = take(kLanes);
    state.out = take(state.head_size);
    state.q = reinterpret_cast<Left*>(take(state.head_size));
    state.weights = reinterpret_cast<Left*>(take(kTile));
    state.max = take(1);
    state.decay = take(1);
    merged = setup.partial_at(next, setup.max_rows);
  }
};

SIMD_INLINE float exp2_of(float x) {
  float lanes[kLanes];
  store(lanes, exp2(broadcast(x)));
  return lanes[0];
}

// into = into merged with the later span `from`.
static inline void fold_row(const AttentionPartial& into, const AttentionPartial& from, size_t row,
                            size_t head_size) {
  const float old_max = into.max[row];
  const float new_max = from.max[row] > old_max ? from.max[row] : old_max;
  const float a = exp2_of(old_max - new_max);
  const float b = exp2_of(from.max[row] - new_max);
  into.max[row] = new_max;
  into.sum[row] = into.sum[row] * a + from.sum[row] * b;
  for (size_t d = row * head_size; d < (row + 1) * head_size; d += kLanes) {
    const F32x16 scaled = mul(load(from.out + d), broadcast(b));
    store(into.out + d, fma(load(into.out + d), broadcast(a), scaled));
  }
}

static inline void clear_partial(const AttentionPartial& partial, size_t rows, size_t head_size) {
  for (size_t r = 0; r < rows; ++r) partial.max[r] = -std::numeric_limits<float>::infinity();
  std::memset(partial.sum, 0, rows * sizeof(float));
  std::memset(partial.out, 0, rows * head_size * sizeof(float));
}

// Rows of the unit that see something of positions [begin, end).
template <class T>
static Range rows_that_see(const AttentionSetup<T>& setup, const AttentionUnit& unit, int64_t begin,
                           int64_t end) {
  size_t first = 0;
  while (first < unit.num_tokens &&
         setup.visible(unit.first_position + static_cast<int64_t>(first)).end <= begin) {
    ++first;
  }
  size_t last = unit.num_tokens;
  while (last > first &&
         setup.visible(unit.first_position + static_cast<int64_t>(last) - 1).begin >= end) {
    --last;
  }
  return {first * setup.heads, last * setup.heads};
}

template <class T>
static void load_queries(const AttentionSetup<T>& setup, const AttentionUnit& unit,
                         const AttentionMemory<T>& memory, size_t first_row = 0) {
  const AttentionCall& call = *setup.call;
  const size_t head_size = setup.layout.head_size;
  auto* to = memory.state.q + first_row * head_size;
  for (size_t t = 0; t < unit.num_tokens; ++t) {
    const T* token = static_cast<const T*>(call.q.data) + (unit.first_token + t) * call.q.stride;
    for (size_t h = 0; h < setup.heads; ++h, to += head_size) {
      copy_row(token + (unit.kv_head * setup.heads + h) * head_size, head_size, head_size, to);
    }
  }
}

// seen: what any row sees, some of it in this tile.
template <class T>
static TileGroups find_groups(const AttentionSetup<T>& setup, const AttentionUnit& unit,
                              int64_t tile_begin, Visible seen) {
  const int64_t begin = seen.begin > tile_begin ? seen.begin : tile_begin;
  const int64_t end = seen.end < tile_begin + kTile ? seen.end : tile_begin + kTile;
  const AttentionCall& call = *setup.call;
  const int32_t* table = call.plan->block_tables + unit.request * call.plan->table_stride;
  TileGroups groups;
  for (int g = 0; g < kTileGroups; ++g) {
    int64_t position = tile_begin + g * kLanes;
    if (position + kLanes <= begin) position = begin;
    if (position >= end) position = end - 1;
    const size_t block = static_cast<size_t>(position) / call.shape.block_size;
    const size_t group = static_cast<size_t>(position) % call.shape.block_size / kLanes;
    const T* keys = static_cast<const T*>(call.cache) +
                    static_cast<size_t>(table[block]) * setup.layout.block +
                    unit.kv_head * setup.layout.head + group * setup.layout.group;
    groups.keys[g] = reinterpret_cast<const uint32_t*>(keys);
    groups.values[g] = reinterpret_cast<const uint32_t*>(keys + setup.layout.side);
  }
  return groups;
}

template <class Dot>
static void clear_rows(const TileState<Dot>& state, Range rows) {
  for (size_t r = rows.begin; r < rows.end; ++r) {
    state.max[r] = -std::numeric_limits<float>::infinity();
    store(state.sums + r * kLanes, zero());
  }
  std::memset(state.out + rows.begin * state.head_size, 0,
              (rows.end - rows.begin) * state.head_size * sizeof(float));
}

// Walks one span; memory.state then holds its rows' max, sums (16 lanes) and out.
template <class T>
static Range walk_span(const AttentionSetup<T>& setup, const AttentionUnit& unit, int64_t span,
                       const AttentionMemory<T>& memory) {
  const auto& state = memory.state;
  const auto visible = [&](size_t row) {
    return setup.visible(unit.first_position + static_cast<int64_t>(row / setup.heads));
  };
  const Range all = rows_that_see(setup, unit, span * kSpan, (span + 1) * kSpan);
  clear_rows(state, all);
  for (int64_t tile = span * kSpan; tile < (span + 1) * kSpan; tile += kTile) {
    const Range rows = rows_that_see(setup, unit, tile, tile + kTile);
    if (rows.begin == rows.end) continue;
    const Visible seen{visible(rows.begin).begin, visible(rows.end - 1).end};
    const TileGroups groups = find_groups(setup, unit, tile, seen);
    TileGroups next;
    const bool has_next = rows.end - rows.begin <= kPrefetchRows && seen.end > tile + kTile;
    if (has_next) next = find_groups(setup, unit, tile + kTile, seen);
    attend_tile(state, groups, tile, rows, setup.scale, visible, has_next ? &next : nullptr);
  }
  return all;
}

// The same for `num_rows` rows of units that see the whole span, in the blocks of `unit`.
template <class T>
static void walk_shared_span(const AttentionSetup<T>& setup, const AttentionUnit& unit,
                             int64_t span, size_t num_rows, const AttentionMemory<T>& memory) {
  const auto& state = memory.state;
  const Range rows{0, num_rows};
  const Visible whole{span * kSpan, (span + 1) * kSpan};
  clear_rows(state, rows);
  for (int64_t tile = whole.begin; tile < whole.end; tile += kTile) {
    const TileGroups groups = find_groups(setup, unit, tile, whole);
    TileGroups next;
    const bool has_next = num_rows <= kPrefetchRows && whole.end > tile + kTile;
    if (has_next) next = find_groups(setup, unit, tile + kTile, whole);
    attend_tile(state, groups, tile, rows, setup.scale, [&](size_t) { return whole; },
                has_next ? &next : nullptr);
  }
}

// Adds the lanes of each row's sum, giving the span as a partial that shares the state's memory.
template <class T>
static AttentionPartial span_result(const AttentionMemory<T>& memory, Range rows) {
  const auto& state = memory.state;
  for (size_t r = rows.begin; r < rows.end; ++r) {
    state.decay[r] = reduce_add(load(state.sums + r * kLanes));
  }
  return {state.max, state.decay, state.out};
}

// out / sum, where a sink is in the sum alone.
template <class T>
static void write_out(const AttentionSetup<T>& setup, const AttentionUnit& unit,
                      const AttentionPartial& merged) {
  const AttentionCall& call = *setup.call;
  const size_t head_size = setup.layout.head_size;
  for (size_t r = 0; r < unit.num_tokens * setup.heads; ++r) {
    const size_t token = unit.first_token + r / setup.heads;
    const size_t head = unit.kv_head * setup.heads + r % setup.heads;
    T* out = static_cast<T*>(call.out) + (token * call.num_heads + head) * head_size;
    float sum = merged.sum[r] == 0 ? 1 : merged.sum[r];  // padding, which sees nothing
    if (call.sinks != nullptr) sum += exp2_of(call.sinks[head] * kLog2E - merged.max[r]);
    for (size_t d = 0; d < head_size; d += kLanes) {
      // + 0: a zero comes out positive, whichever way its sum went to it.
      const F32x16 y = div(load(merged.out + r * head_size + d), broadcast(sum));
      store(out + d, add(y, zero()));
    }
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
