// Scores and values of attention_tile.h by AMX, in the order of sums of tiles.h: the values of a
// group of 16 tokens are one step of it.

#pragma once

#include "attention_tile.h"
#include "integers.h"
#include "tiles.h"

#ifdef __AMX_BF16__

namespace lora_serve::LORA_SERVE_PATH {

static_assert(kTileGroups == kTileColumns, "a tile's groups are the columns of one product");

// run(rows) for at most 16 rows at a time.
template <class Run>
SIMD_INLINE void for_each_tile(Range rows, const Run& run) {
  for (size_t row = rows.begin; row < rows.end; row += kRowsOfTile) {
    run(Range{row, row + kRowsOfTile < rows.end ? row + kRowsOfTile : rows.end});
  }
}

static void tile_scores(const TileState<Bfloat16Tiles>& state, const TileGroups& groups,
                        Range rows) {
  RightView<kTileGroups> right{{}, kLanes};
  for (int g = 0; g < kTileGroups; ++g) right.vectors[g] = groups.keys[g];
  for_each_tile(rows, [&](Range block) {
    const size_t num_rows = block.end - block.begin;
    const TileRows left{state.q + block.begin * state.head_size,
                        state.head_size * sizeof(Bfloat16)};
    configure_tiles(num_rows);
    clear_tiles<kTileGroups>();
    multiply_tiles<kTileGroups>(left, num_rows, right,
                                state.head_size / kPerWord<Bfloat16>, FetchNothing{});
    store_sums<kTileGroups>(state.scores + block.begin * kTile, kTile);
  });
}

// The words of a group whose tokens are in [begin, end), with zeros for the others.
template <int kVectors>
static void copy_seen(const uint32_t* values, size_t step, int begin, int end,
                      uint32_t (&to)[kHalfTileWords][kVectors * kLanes]) {
  for (int word = 0; word < kHalfTileWords; ++word) {
    const auto seen = [&](int token) { return begin <= token && token < end; };
    const uint32_t mask =
        (seen(2 * word) ? 0x0000ffffu : 0) | (seen(2 * word + 1) ? 0xffff0000u : 0);
    for (int v = 0; v < kVectors; ++v) {
      store_words(to[word] + v * kLanes,
                  mask_words(load_words(values + word * step + v * kLanes), mask));
    }
  }
}

// At most 16 rows times 16 kVectors channels.
template <int kVectors>
static void add_values(const TileState<Bfloat16Tiles>& state, const TileGroups& groups, Range rows,
                       size_t channel, Part part) {
  float* const out = state.out + rows.begin * state.head_size + channel;
  for (size_t row = rows.begin; row < rows.end; ++row) {
    float* const at = out + (row - rows.begin) * state.head_size;
    const F32x16 decay = broadcast(state.decay[row]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(at + v * kLanes, mul(load(at + v * kLanes), decay));
  }
  configure_tiles(rows.end - rows.begin);
  load_sums<kVectors>(out, state.head_size);
  for (int g = part.begin / kLanes; g * kLanes < part.end; ++g) {
    const int begin = clamp_lane(part.begin - g * kLanes), end = clamp_lane(part.end - g * kLanes);
    alignas(64) uint32_t edge[kHalfTileWords][kVectors * kLanes];
    const uint32_t* values = groups.values[g] + channel;
    size_t step = state.head_size;
    if (begin > 0 || end < kLanes) {
      copy_seen<kVectors>(values, step, begin, end, edge);
      values = edge[0];
      step = kVectors * kLanes;
    }
    RightView<kVectors> right{{}, step};
    for (int v = 0; v < kVectors; ++v) right.vectors[v] = values + v * kLanes;
    settle(edge);
    multiply_half_tile<kVectors>({state.weights + rows.begin * kTile + g * kLanes,
                                  kTile * sizeof(Bfloat16)},
                                 right, 0, step * sizeof(uint32_t));
  }
  store_sums<kVectors>(out, state.head_size);
}

static void tile_values(const TileState<Bfloat16Tiles>& state, const TileGroups& groups,
                        Range rows, Part part) {
  constexpr size_t kStep = kTileColumns * kLanes;
  for_each_tile(rows, [&](Range block) {
    size_t channel = 0;
    for (; channel + kStep <= state.head_size; channel += kStep) {
      add_values<kTileColumns>(state, groups, block, channel, part);
    }
    for (; channel < state.head_size; channel += kLanes) {
      add_values<1>(state, groups, block, channel, part);
    }
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH

#endif
