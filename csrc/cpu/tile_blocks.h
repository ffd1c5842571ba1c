// Many rows times packed weights by AMX, in blocks of 32 rows times a pair of panels. The order of
// sums is that of tiles.h: how the tiles are cut changes no bit.
//
// A block has four tiles of sums and loads two of each side for every 16 words: as many loads as
// products, where one tile of rows times four panels needs five for four. Long rows are cut into
// segments, so that a chunk's rows of one segment stay in L2 while all pairs of a task pass; a
// block's sums wait in memory, as they are, for the next segment.
//
// Several products of the same rows may be finished together, block by block: Finish::kProducts of
// as many panels each, whose weights lie one behind another.

#pragma once

#include "tiles.h"

namespace lora_serve::LORA_SERVE_PATH {

template <class Dot>
static size_t words_of_panels(const PanelProduct<Dot>& product) {
  return product.num_panels * product.num_words * kLanes;
}

// finish.panel(index, row, panel, sums) for all of each product, one after another.
template <class Dot, class Finish>
static void products_of(PanelProduct<Dot> product, Range rows, Range panels, const Finish& finish) {
  for (size_t i = 0; i < Finish::kProducts; ++i) {
    product_of(product, rows, panels, [&](size_t row, size_t panel, const float* sums) {
      finish.panel(i, row, panel, sums);
    });
    product.packed += words_of_panels(product);
  }
}

#ifdef __AMX_BF16__

constexpr size_t kRowsOfBlock = 2 * kRowsOfTile;
constexpr size_t kSumsOfRow = kPair * kLanes;
constexpr size_t kSumsOfBlock = kRowsOfBlock * kSumsOfRow;

// Emerald Rapids, 1 shared core, November 2026, the four products of a layer of Qwen2.5-0.5B at
// 1,024 rows: 33 ms of processor time, and 48 without blocks. Segments of 20 steps cost 9 %, chunks
// of 256 rows 4 %, four pairs of panels to a task 5 %.
constexpr size_t kMostSteps = 40;  // of a segment
constexpr size_t kMostBlocks = 16;
constexpr size_t kChunkBytesInL2 = 1 << 20;
constexpr size_t kMostPairs = 8;  // of a task whose sums wait in memory

// Whether a product is worth blocks, and can be cut into them: whole steps alone. Rows that are
// left over cost more beside blocks than among 16 and 16: 31 of 63 rows 18 %, on the same machine.
static constexpr bool has_tile_blocks(size_t rows, size_t num_words) {
  const bool is_worth_it = rows >= kRowsOfBlock && (rows >= 4 * kRowsOfBlock ||
                                                    rows % kRowsOfBlock <= kRowsOfTile);
  return is_worth_it && num_words % kTileWords == 0 && num_words > 0;
}

// How all blocks of a product are shared among tasks: chunks of rows times ranges of panels.
struct BlockTasks {
  size_t rows, panels, segments, chunks, ranges;

  BlockTasks(size_t num_rows, size_t num_panels, size_t num_words, Team team)
      : rows(num_rows), panels(num_panels) {
    segments = ceil_div(num_words / kTileWords, kMostSteps);
    const size_t segment_bytes = num_words * sizeof(uint32_t) / segments;
    const size_t fit = kChunkBytesInL2 / (segment_bytes * kRowsOfBlock);
    chunks = ceil_div(num_rows / kRowsOfBlock, fit < 1 ? 1 : fit < kMostBlocks ? fit : kMostBlocks);
    const size_t pairs = ceil_div(num_panels, kPair);
    const size_t wanted = static_cast<size_t>(team.num_threads) * (segments == 1 ? 32 : 4);
    const size_t least = segments == 1 || pairs < kMostPairs ? 1 : ceil_div(pairs, kMostPairs);
    ranges = wanted < least ? least : wanted < pairs ? wanted : pairs;
  }

  size_t count() const { return chunks * ranges; }
  // The last chunk has the rows that are left over from blocks.
  Range rows_of(size_t task) const {
    const Range blocks = part_of(rows / kRowsOfBlock, chunks, task / ranges);
    const bool is_last = blocks.end == rows / kRowsOfBlock;
    return {blocks.begin * kRowsOfBlock, is_last ? rows : blocks.end * kRowsOfBlock};
  }
  Range panels_of(size_t task) const { return part_of_panels(panels, ranges, task % ranges); }
  // Floats that wait between segments in one task, of one product.
  size_t waiting_sums() const {
    if (segments == 1) return 0;
    const size_t pairs = ceil_div(panels, kPair);
    return ceil_div(rows / kRowsOfBlock, chunks) * ceil_div(pairs, ranges) * kSumsOfBlock;
  }
};

// All eight tiles are whole.
SIMD_INLINE void configure_whole_tiles() {
  constexpr size_t kWhole = kRowsOfTile + 1;  // what no product's rows are
  if (TaskScope::tile_rows == kWhole) return;
  TileConfig config(kRowsOfTile);
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = kRowsOfTile;
    config.row_bytes[tile] = kTileWords * sizeof(uint32_t);
  }
  settle(&config);
  _tile_loadconfig(&config);
  TaskScope::tile_rows = kWhole;
}

// A block's rows and pair, `num_steps` times 16 words.
struct TileBlock {
  TileRows left;
  const uint32_t* right;
  size_t num_steps;
};

// Into L2, with every step.
struct LinesInto2 {
  const char* lines;
  size_t count;

  __attribute__((always_inline)) void next() {
    for (size_t i = 0; i < count; ++i) __builtin_prefetch(lines + 64 * i, 0, 2);
    lines += 64 * count;
  }
};

SIMD_INLINE void load_block_sums(const float* sums) {
  constexpr size_t kBytes = kSumsOfRow * sizeof(float);
  settle(sums);
  _tile_loadd(0, sums, kBytes);
  _tile_loadd(1, sums + kLanes, kBytes);
  _tile_loadd(2, sums + kRowsOfTile * kSumsOfRow, kBytes);
  _tile_loadd(3, sums + kRowsOfTile * kSumsOfRow + kLanes, kBytes);
}

SIMD_INLINE void store_block_sums(float* sums) {
  constexpr size_t kBytes = kSumsOfRow * sizeof(float);
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + kLanes, kBytes);
  _tile_stored(2, sums + kRowsOfTile * kSumsOfRow, kBytes);
  _tile_stored(3, sums + kRowsOfTile * kSumsOfRow + kLanes, kBytes);
  settle(sums);
}

SIMD_INLINE void multiply_tile_block(const TileBlock& block, LinesInto2 fetch) {
  constexpr size_t kWords = kPair * kLanes, kStride = kWords * sizeof(uint32_t);
  const size_t stride = block.left.stride;
  TileRows above = block.left, below = block.left.from(kRowsOfTile * stride);
  const uint32_t* right = block.right;
  settle(above.data);
  for (size_t step = 0; step < block.num_steps; ++step) {
    fetch.next();
    _tile_loadd(4, above.data, stride);
    _tile_loadd(6, right, kStride);
    _tile_loadd(7, right + kLanes, kStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, below.data, stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    above = above.from(kTileWords * sizeof(uint32_t));
    below = below.from(kTileWords * sizeof(uint32_t));
    right += kTileWords * kWords;
  }
}

// One segment of all blocks times one pair of each product. waiting: kSumsOfBlock of each block and
// product, where there are more segments. due: what is multiplied after this, of the same size, in
// the first product.
template <class Finish>
static void multiply_pair_in_blocks(const PanelProduct<Bfloat16Tiles>& product, Range rows,
                                    size_t panel, Range steps, const uint32_t* due, float* waiting,
                                    const Finish& finish) {
  constexpr size_t kStepWords = kTileWords * kPair * kLanes;
  const size_t num_steps = steps.end - steps.begin;
  const size_t num_blocks = (rows.end - rows.begin) / kRowsOfBlock;
  const bool is_first = steps.begin == 0, is_last = steps.end * kTileWords == product.num_words;
  const uint32_t* right = product.packed + panel * product.num_words * kLanes;
  constexpr size_t kSums = Finish::kProducts * kSumsOfBlock;
  const size_t product_words = words_of_panels(product);
  const size_t lines_of_step = ceil_div(kStepWords * sizeof(uint32_t) / 64, num_blocks);
  alignas(64) float done[kSums];
  for (size_t b = 0; b < num_blocks; ++b) {
    const size_t row = rows.begin + b * kRowsOfBlock;
    const Bfloat16* left = product.left + row * product.left_stride;
    float* const at = waiting + (waiting == nullptr ? 0 : b * kSums);
    if (is_last) finish.prepare(row, panel);
#pragma GCC unroll 2
    for (size_t i = 0; i < Finish::kProducts; ++i) {
      if (is_first) {
        clear_tiles<4>();
      } else {
        load_block_sums(at + i * kSumsOfBlock);
      }
      multiply_tile_block({{left + steps.begin * kTileWords * kPerWord<Bfloat16>,
                            product.left_stride * sizeof(Bfloat16)},
                           right + i * product_words + steps.begin * kStepWords,
                           num_steps},
                          {reinterpret_cast<const char*>(due + i * product_words) +
                               64 * lines_of_step * num_steps * b,
                           lines_of_step});
      store_block_sums((is_last ? done : at) + i * kSumsOfBlock);
    }
    if (is_last) finish.block(row, panel, done);
  }
}

// Whole blocks of rows times whole pairs of panels.
template <class Finish>
static void product_of_blocks(const PanelProduct<Bfloat16Tiles>& product, Range rows, Range panels,
                              size_t segments, float* waiting, const Finish& finish) {
  constexpr size_t kStepWords = kTileWords * kPair * kLanes;
  const size_t pair_words = product.num_words * kPair * kLanes;
  const size_t pair_sums = Finish::kProducts * (rows.end - rows.begin) * kSumsOfRow;
  configure_whole_tiles();
  for (size_t s = 0; s < segments; ++s) {
    const Range steps = part_of(product.num_words / kTileWords, segments, s);
    for (size_t panel = panels.begin; panel < panels.end; panel += kPair) {
      const bool is_last = panel + kPair == panels.end && s + 1 < segments;
      const size_t first = (is_last ? panels.begin / kPair : panel / kPair + 1) * pair_words;
      const size_t step = is_last ? steps.end : steps.begin;
      const uint32_t* due = product.packed + first + step * kStepWords;
      const size_t before = (panel - panels.begin) / kPair * pair_sums;
      float* sums = waiting == nullptr ? nullptr : waiting + before;
      multiply_pair_in_blocks(product, rows, panel, steps, due, sums, finish);
    }
  }
}

// All rows and panels of a task. finish.prepare(row, panel) comes before finish.block(row, panel,
// sums), which takes 32 rows of 32 sums of each product, and finish.panel(index, row, panel, sums),
// which takes 16 of a product, earlier products' first. waiting: tasks.waiting_sums() of each.
template <class Finish>
static void product_of_task(const PanelProduct<Bfloat16Tiles>& product, const BlockTasks& tasks,
                            size_t task, float* waiting, const Finish& finish) {
  const Range rows = tasks.rows_of(task), panels = tasks.panels_of(task);
  const Range blocks{rows.begin, rows.end / kRowsOfBlock * kRowsOfBlock};
  const Range pairs{panels.begin, panels.end / kPair * kPair};
  product_of_blocks(product, blocks, pairs, tasks.segments, waiting, finish);
  products_of(product, blocks, {pairs.end, panels.end}, finish);
  products_of(product, {blocks.end, rows.end}, panels, finish);
}

#endif

}  // namespace lora_serve::LORA_SERVE_PATH
