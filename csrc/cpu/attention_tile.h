// One tile of 64 absolute positions for the query rows of a block: scores, softmax, values.
//
// R rows (tokens of one request times the heads that share a kv head), D head size, words as in
// dtype.h, layout of the cache as in kv_layout.h.
//
//   s = q . k        p = 2^(s scale log2(e) - max)        out = out 2^(old max - max) + sum p v
//
// What a row computes depends on its own position and window alone. Positions that it does not see
// are never multiplied, not even by zero: they may hold anything, NaN too. p is rounded to the
// left type of the path's product, its sum is not.

#pragma once

#include <cmath>
#include <limits>

#include "blocks.h"
#include "exponential.h"
#include "kv_layout.h"

namespace lora_serve::LORA_SERVE_PATH {

constexpr int kTileGroups = 4;
constexpr int kTile = kTileGroups * kLanes;

// 24 + 4 + 1 of 32 registers; 12 + 2 + 1 of 16 on AVX2.
constexpr int kTileRows = 6;
#ifdef __AVX512F__
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 1;
#endif

// Positions [begin, end) that a row sees. Both grow with the row's own position.
struct Visible {
  int64_t begin, end;
};

// Running softmax of R rows over the positions walked so far.
template <class Dot>
struct TileState {
  typename Dot::Left* q;        // (R, D)
  float* scores;                // (R, kTile)
  typename Dot::Left* weights;  // (R, kTile)
  float* max;                   // (R), of scores times scale log2(e)
  float* decay;                 // (R), what this tile's new maximum does to older sums
  float* sums;                  // (R, 16), added up at the end
  float* out;                   // (R, D)
  size_t head_size;
};

// The tile's groups; one that nobody sees points to one that somebody does, so that it can be read.
struct TileGroups {
  const uint32_t* keys[kTileGroups];
  const uint32_t* values[kTileGroups];
};

template <class Dot>
static void tile_scores(const TileState<Dot>& state, const TileGroups& groups, Range rows) {
  const size_t words = state.head_size / kPerWord<typename Dot::Word>;
  for (int g = 0; g < kTileGroups; g += kTileVectors) {
    RightView<kTileVectors> right{{}, kLanes};
    for (int v = 0; v < kTileVectors; ++v) right.vectors[v] = groups.keys[g + v];
    for_each_block<kTileRows>(rows.begin, rows.end, [&](size_t row, auto count) {
      product_block<Dot, decltype(count)::value, kTileVectors>(
          state.q + row * state.head_size, state.head_size, right, words,
          [&](int r, int v, F32x16 sum) {
            store(state.scores + (row + r) * kTile + (g + v) * kLanes, sum);
          });
    });
  }
}

SIMD_INLINE int clamp_lane(int64_t lane) {
  return static_cast<int>(lane < 0 ? 0 : lane > kLanes ? kLanes : lane);
}

// begin, end: what the row sees of the tile, 0 <= begin < end <= kTile.
template <class Dot>
SIMD_INLINE void softmax_row(const TileState<Dot>& state, size_t row, float scale, int begin,
                             int end) {
  F32x16 s[kTileGroups];
  F32x16 highest = broadcast(-std::numeric_limits<float>::infinity());
#pragma GCC unroll 4
  for (int g = 0; g < kTileGroups; ++g) {
    s[g] = load(state.scores + row * kTile + g * kLanes);
    s[g] = keep_lanes(s[g], clamp_lane(begin - g * kLanes), clamp_lane(end - g * kLanes),
                      -std::numeric_limits<float>::infinity());
    highest = at_least(highest, s[g]);
  }
  const float old_max = state.max[row];
  const float tile_max = reduce_max(highest) * scale;
  const float new_max = tile_max > old_max ? tile_max : old_max;
  float decay = 1.0f;
  if (new_max != old_max) {
    float lanes[kLanes];
    store(lanes, exp2(broadcast(old_max - new_max)));
    decay = lanes[0];
  }
  state.max[row] = new_max;
  state.decay[row] = decay;

  F32x16 sum = mul(load(state.sums + row * kLanes), broadcast(decay));
#pragma GCC unroll 4
  for (int g = 0; g < kTileGroups; ++g) {
    const F32x16 p = exp2(fma(s[g], broadcast(scale), broadcast(-new_max)));
    store(state.weights + row * kTile + g * kLanes, p);
    sum = add(sum, p);
  }
  store(state.sums + row * kLanes, sum);
}

// acc += p v over tokens [begin, end) of one group; half a word at an edge is masked, not
// multiplied.
template <class Dot, int kRows, int kVectors>
SIMD_INLINE void add_group(const typename Dot::Left* weights, RightView<kVectors> values, int begin,
                           int end, F32x16 (&acc)[kRows][kVectors]) {
  constexpr int kPer = kPerWord<typename Dot::Word>;
  const auto masked = [&](int word, uint32_t mask) {
    U32x16 words[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      words[v] = mask_words(load_words(values.vectors[v] + word * values.step), mask);
    }
    multiply_word<Dot>(weights + word * kPer, kTile, words, acc);
  };
  int word = begin / kPer;
  if (begin % kPer != 0) masked(word++, 0xffff0000u);
  const int whole = end / kPer;
  if (whole > word) {
    RightView<kVectors> rest = values;
    for (int v = 0; v < kVectors; ++v) rest.vectors[v] += word * values.step;
    multiply<Dot>(weights + word * kPer, kTile, rest, static_cast<size_t>(whole - word), acc);
  }
  if (end % kPer != 0) masked(whole, 0x0000ffffu);
}

// out = out * decay + p v for rows that all see [begin, end) of the tile.
template <class Dot, int kRows, int kVectors>
static __attribute__((noinline)) void add_values(const TileState<Dot>& state,
                                                 const TileGroups& groups, size_t row,
                                                 size_t channel, int begin, int end) {
  const size_t stride = state.head_size;
  float* out = state.out + row * stride + channel;
  F32x16 acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = mul(load(out + r * stride + v * kLanes), broadcast(state.decay[row + r]));
    }
  }
  for (int g = begin / kLanes; g * kLanes < end; ++g) {
    RightView<kVectors> values{{}, stride};
    for (int v = 0; v < kVectors; ++v) values.vectors[v] = groups.values[g] + channel + v * kLanes;
    add_group<Dot>(state.weights + row * kTile + g * kLanes, values, clamp_lane(begin - g * kLanes),
                   clamp_lane(end - g * kLanes), acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(out + r * stride + v * kLanes, acc[r][v]);
  }
}

template <class Dot>
static void tile_values(const TileState<Dot>& state, const TileGroups& groups, Range rows,
                        int begin, int end) {
  for_each_block<kTileRows>(rows.begin, rows.end, [&](size_t row, auto count) {
    size_t channel = 0;
    for (; channel + kTileVectors * kLanes <= state.head_size; channel += kTileVectors * kLanes) {
      add_values<Dot, decltype(count)::value, kTileVectors>(state, groups, row, channel, begin,
                                                            end);
    }
    for (; channel < state.head_size; channel += kLanes) {
      add_values<Dot, decltype(count)::value, 1>(state, groups, row, channel, begin, end);
    }
  });
}

// Rows that see something of the tile; visible(row) in absolute positions.
template <class Dot, class See>
static void attend_tile(const TileState<Dot>& state, const TileGroups& groups, int64_t tile_begin,
                        Range rows, float scale, const See& visible) {
  const auto part = [&](size_t row) {
    const Visible seen = visible(row);
    const int64_t begin = seen.begin - tile_begin;
    const int64_t end = seen.end - tile_begin;
    return Visible{begin < 0 ? 0 : begin, end > kTile ? kTile : end};
  };
  tile_scores(state, groups, rows);
  size_t first = rows.begin;
  for (size_t row = rows.begin; row < rows.end; ++row) {
    const Visible seen = part(row);
    softmax_row(state, row, scale, static_cast<int>(seen.begin), static_cast<int>(seen.end));
    const bool last = row + 1 == rows.end;
    const Visible next = last ? Visible{-1, -1} : part(row + 1);
    if (next.begin == seen.begin && next.end == seen.end) continue;
    tile_values(state, groups, {first, row + 1}, static_cast<int>(seen.begin),
                static_cast<int>(seen.end));
    first = row + 1;
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
