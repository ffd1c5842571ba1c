// Products by AMX: 16 rows times 16 columns at once, over 32 elements of bfloat16.
//
// The order of sums is another than that of product.h. Words of the summed dimension are taken 16
// at a time, then 8, then what is left with zeros behind it. Of these words the lower halves are
// multiplied and added in ascending order from 0, each fused and rounded to float, and so are the
// upper halves; then
//
//   acc = acc + (sum of the lower ones + sum of the upper ones)
//
// which is what tdpbf16ps does. Denormals, given or made, are zero. So an element's sum depends on
// its place alone here too: how many rows and columns are computed at once changes no bit.

#pragma once

#include "blocks.h"

#ifdef __AMX_BF16__

namespace lora_serve::LORA_SERVE_PATH {

// What DotFor gives for bfloat16: both sides stay words of pairs, and tiles multiply them.
struct Bfloat16Tiles {
  using Left = Bfloat16;
  using Word = Bfloat16;
};

template <>
struct DotFor<Bfloat16> {
  using Type = Bfloat16Tiles;
};

template <>
constexpr bool kInTiles<Bfloat16Tiles> = true;

constexpr int kTileWords = 16, kHalfTileWords = 8;

// Rows of a tile: more are several tiles.
constexpr size_t kRowsOfTile = 16;

// Vectors of columns that share a reading of the left side.
constexpr int kTileColumns = 4;

// The registers. GCC wants their numbers as literals.
#define TILE_LEFT 4
#define TILE_RIGHT 5
#define TILE_LEFT_HALF 6
#define TILE_RIGHT_HALF 7

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(size_t num_rows) {
    const auto set = [this](int tile, size_t tile_rows, int words) {
      rows[tile] = static_cast<uint8_t>(tile_rows);
      row_bytes[tile] = static_cast<uint16_t>(words * 4);
    };
    for (int sums = 0; sums < kTileColumns; ++sums) set(sums, num_rows, kLanes);
    set(TILE_LEFT, num_rows, kTileWords);
    set(TILE_RIGHT, kTileWords, kLanes);
    set(TILE_LEFT_HALF, num_rows, kHalfTileWords);
    set(TILE_RIGHT_HALF, kHalfTileWords, kLanes);
  }
};

// What was written before is in memory: GCC's intrinsics do not say that they read it.
SIMD_INLINE void settle(const void* written) { asm volatile("" : : "r"(written) : "memory"); }

// The tiles have as many rows as the product has. Others use them between our tasks: what torch
// multiplies configures them as it likes.
SIMD_INLINE void configure_tiles(size_t num_rows) {
  if (TaskScope::tile_rows == num_rows) return;
  const TileConfig config(num_rows);
  settle(&config);
  _tile_loadconfig(&config);
  TaskScope::tile_rows = num_rows;
}

// What a product asks memory for with every 16 words: `count` cache lines.
struct LinesAhead {
  const char* lines;
  size_t count;
  bool is_late;  // needed after this product: into L2, for L1 has what is multiplied now

  void next() {
    if (is_late) {
      for (size_t i = 0; i < count; ++i) __builtin_prefetch(lines + 64 * i, 0, 2);
    } else {
      for (size_t i = 0; i < count; ++i) __builtin_prefetch(lines + 64 * i);
    }
    lines += 64 * count;
  }
};

// What a tile is read from: a row every `stride` bytes.
struct TileRows {
  const void* data;
  size_t stride;

  TileRows from(size_t bytes) const { return {static_cast<const char*>(data) + bytes, stride}; }
};

template <int kVectors>
SIMD_INLINE void clear_tiles() {
  _tile_zero(0);
  if constexpr (kVectors > 1) _tile_zero(1);
  if constexpr (kVectors > 2) _tile_zero(2);
  if constexpr (kVectors > 3) _tile_zero(3);
}

template <int kVectors>
SIMD_INLINE void load_sums(const float* sums, size_t stride) {
  const size_t bytes = stride * sizeof(float);
  settle(sums);
  _tile_loadd(0, sums, bytes);
  if constexpr (kVectors > 1) _tile_loadd(1, sums + kLanes, bytes);
  if constexpr (kVectors > 2) _tile_loadd(2, sums + 2 * kLanes, bytes);
  if constexpr (kVectors > 3) _tile_loadd(3, sums + 3 * kLanes, bytes);
}

template <int kVectors>
SIMD_INLINE void store_sums(float* sums, size_t stride) {
  const size_t bytes = stride * sizeof(float);
  _tile_stored(0, sums, bytes);
  if constexpr (kVectors > 1) _tile_stored(1, sums + kLanes, bytes);
  if constexpr (kVectors > 2) _tile_stored(2, sums + 2 * kLanes, bytes);
  if constexpr (kVectors > 3) _tile_stored(3, sums + 3 * kLanes, bytes);
}

// 16 words of every column of the right side, from `at` on, every `step` bytes.
template <int kVectors>
SIMD_INLINE void multiply_tile(TileRows left, const RightView<kVectors>& right, size_t at,
                               size_t step) {
  _tile_loadd(TILE_LEFT, left.data, left.stride);
  _tile_loadd(TILE_RIGHT, right.vectors[0] + at, step);
  _tile_dpbf16ps(0, TILE_LEFT, TILE_RIGHT);
  if constexpr (kVectors > 1) {
    _tile_loadd(TILE_RIGHT, right.vectors[1] + at, step);
    _tile_dpbf16ps(1, TILE_LEFT, TILE_RIGHT);
  }
  if constexpr (kVectors > 2) {
    _tile_loadd(TILE_RIGHT, right.vectors[2] + at, step);
    _tile_dpbf16ps(2, TILE_LEFT, TILE_RIGHT);
  }
  if constexpr (kVectors > 3) {
    _tile_loadd(TILE_RIGHT, right.vectors[3] + at, step);
    _tile_dpbf16ps(3, TILE_LEFT, TILE_RIGHT);
  }
}

// The same for 8 words.
template <int kVectors>
SIMD_INLINE void multiply_half_tile(TileRows left, const RightView<kVectors>& right, size_t at,
                                    size_t step) {
  _tile_loadd(TILE_LEFT_HALF, left.data, left.stride);
  _tile_loadd(TILE_RIGHT_HALF, right.vectors[0] + at, step);
  _tile_dpbf16ps(0, TILE_LEFT_HALF, TILE_RIGHT_HALF);
  if constexpr (kVectors > 1) {
    _tile_loadd(TILE_RIGHT_HALF, right.vectors[1] + at, step);
    _tile_dpbf16ps(1, TILE_LEFT_HALF, TILE_RIGHT_HALF);
  }
  if constexpr (kVectors > 2) {
    _tile_loadd(TILE_RIGHT_HALF, right.vectors[2] + at, step);
    _tile_dpbf16ps(2, TILE_LEFT_HALF, TILE_RIGHT_HALF);
  }
  if constexpr (kVectors > 3) {
    _tile_loadd(TILE_RIGHT_HALF, right.vectors[3] + at, step);
    _tile_dpbf16ps(3, TILE_LEFT_HALF, TILE_RIGHT_HALF);
  }
}

// Fewer than 8 words from `at` on, with zeros behind them.
template <int kVectors>
static __attribute__((noinline)) void multiply_last_words(TileRows left, size_t num_rows,
                                                          const RightView<kVectors>& right,
                                                          size_t at, size_t num_words) {
  alignas(64) uint32_t left_words[kRowsOfTile][kHalfTileWords] = {};
  alignas(64) uint32_t right_words[kVectors][kHalfTileWords][kLanes] = {};
  RightView<kVectors> padded{{}, kLanes};
  for (size_t r = 0; r < num_rows; ++r) {
    std::memcpy(left_words[r], left.from(r * left.stride).data, num_words * sizeof(uint32_t));
  }
  for (int v = 0; v < kVectors; ++v) {
    for (size_t k = 0; k < num_words; ++k) {
      std::memcpy(right_words[v][k], right.vectors[v] + at + k * right.step,
                  sizeof right_words[v][k]);
    }
    padded.vectors[v] = right_words[v][0];
  }
  settle(left_words);
  multiply_half_tile<kVectors>({left_words, sizeof left_words[0]}, padded, 0,
                               sizeof right_words[0][0]);
}

// Adds the products of num_words words of num_rows rows, at most 16, to the tiles of sums.
template <int kVectors, class Fetch>
SIMD_INLINE void multiply_tiles(TileRows left, size_t num_rows, const RightView<kVectors>& right,
                                size_t num_words, Fetch fetch) {
  const size_t step = right.step * sizeof(uint32_t);
  settle(left.data);
  size_t k = 0;
  for (; k + kTileWords <= num_words; k += kTileWords) {
    fetch.next();
    multiply_tile<kVectors>(left.from(k * sizeof(uint32_t)), right, k * right.step, step);
  }
  if (k + kHalfTileWords <= num_words) {
    multiply_half_tile<kVectors>(left.from(k * sizeof(uint32_t)), right, k * right.step, step);
    k += kHalfTileWords;
  }
  if (k < num_words) {
    multiply_last_words<kVectors>(left.from(k * sizeof(uint32_t)), num_rows, right, k * right.step,
                                  num_words - k);
  }
}

// Rows whose sums are kept while segments of the right side come and go: 128 KiB with 4 vectors.
constexpr size_t kRowsOfSums = 32 * kRowsOfTile;

// Words of 4 vectors that stay in L1 while all rows are multiplied with them: 32 KiB.
constexpr size_t kWordsOfSegment = 8 * kTileWords;

// All rows, at most kRowsOfSums, times kVectors panels from `panel` on.
template <int kVectors, class Finish>
static void multiply_panels_in_tiles(const PanelProduct<Bfloat16Tiles>& product, Range rows,
                                     size_t panel, const Finish& finish) {
  const RightView<kVectors> right = view_of_panels<kVectors>(product, panel);
  const size_t stride = product.left_stride * sizeof(Bfloat16);
  const size_t count = rows.end - rows.begin, num_blocks = ceil_div(count, kRowsOfTile);
  const size_t segment = num_blocks == 1 ? product.num_words : kWordsOfSegment;
  const char* const panel_bytes = reinterpret_cast<const char*>(right.vectors[0]);
  // One block of rows finds its panels in memory, and asks for what is due shortly; several ask for
  // the panels that follow, each for its share.
  LinesAhead fetch{panel_bytes + kWordsAhead * right.step * sizeof(uint32_t),
                   kVectors * kTileWords, false};
  if (num_blocks > 1) {
    fetch = {panel_bytes + kVectors * product.num_words * kLanes * sizeof(uint32_t),
             ceil_div(kVectors * kTileWords, num_blocks), true};
  }
  alignas(64) float sums[kRowsOfSums][kVectors * kLanes];
  for (size_t begin = 0; begin < product.num_words || begin == 0; begin += segment) {
    const size_t left_over = product.num_words - begin;
    const size_t words = left_over < segment ? left_over : segment;
    RightView<kVectors> part = right;
    for (int v = 0; v < kVectors; ++v) part.vectors[v] += begin * right.step;
    for (size_t row = 0; row < count; row += kRowsOfTile) {
      const size_t num_rows = count - row < kRowsOfTile ? count - row : kRowsOfTile;
      configure_tiles(num_rows);
      if (begin == 0) {
        clear_tiles<kVectors>();
      } else {
        load_sums<kVectors>(sums[row], kVectors * kLanes);
      }
      const Bfloat16* left = product.left + (rows.begin + row) * product.left_stride;
      multiply_tiles<kVectors>({left + begin * kPerWord<Bfloat16>, stride}, num_rows, part, words,
                               fetch);
      if (num_blocks > 1) fetch.lines += fetch.count * (words / kTileWords) * 64;
      store_sums<kVectors>(sums[row], kVectors * kLanes);
    }
  }
  for (size_t r = 0; r < count; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      finish(rows.begin + r, panel + v, static_cast<const float*>(sums[r] + v * kLanes));
    }
  }
}

template <class Finish>
static void product_of(const PanelProduct<Bfloat16Tiles>& product, Range rows, Range panels,
                       const Finish& finish) {
  for (; rows.begin < rows.end; rows.begin += kRowsOfSums) {
    const size_t end = rows.begin + kRowsOfSums < rows.end ? rows.begin + kRowsOfSums : rows.end;
    const Range block{rows.begin, end};
    size_t panel = panels.begin;
    // Four panels have one step only where all have partners.
    const size_t paired = product.num_panels / kPair * kPair;
    for (; panel + kTileColumns <= panels.end && panel + kTileColumns <= paired;
         panel += kTileColumns) {
      multiply_panels_in_tiles<kTileColumns>(product, block, panel, finish);
    }
    for (; panel + kPair <= panels.end && panel % kPair == 0; panel += kPair) {
      multiply_panels_in_tiles<kPair>(product, block, panel, finish);
    }
    for (; panel < panels.end; ++panel) {
      multiply_panels_in_tiles<1>(product, block, panel, finish);
    }
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH

#endif
