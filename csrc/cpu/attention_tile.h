// One tile of 64 absolute positions for the query rows of a block: scores, softmax, values.
//
// R rows (tokens of one request times the heads that share a kv head), D head size, words as in
// dtype.h, layout of the cache as in kv_layout.h.
//
//   s = q . k        p = 2^(l - max)        out = out 2^(old max - max) + sum p v
//
// where l is the logit of s in base 2, see LogitScale.
//
// What a row computes depends on its own position and window alone. Positions that it does not see
// are never multiplied, not even by zero: they may hold anything, NaN too. p is rounded as
// store_left does, its sum is not.

#pragma once

#include <cmath>
#include <limits>

#include "blocks.h"
#include "exponential.h"
#include "kv_layout.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

constexpr int kTileGroups = 4;
constexpr int kTile = kTileGroups * kLanes;

// 24 + 4 + 1 of 32 registers; 12 + 2 + 1 of 16 on AVX2.
constexpr int kTileRows = kIsSmallBuild ? 2 : 6;
#ifdef __AVX512F__
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 1;
#endif

// Positions [begin, end) that a row sees. Both grow with the row's own position.
struct Visible {
  int64_t begin, end;
};

// l = outer s; with soft-capping, l = outer tanh(inner s). Of logits scale s, outer is
// scale log2(e); of logits cap tanh(scale s / cap), it is cap log2(e).
struct LogitScale {
  float inner;  // 0: no cap
  float outer;
};

// Running softmax of R rows over the positions walked so far.
template <class Dot>
struct TileState {
  typename Dot::Left* q;        // (R, D)
  float* scores;                // (R, kTile): s, or tanh(inner s)
  typename Dot::Left* weights;  // (R, kTile)
  float* max;                   // (R), of l
  float* decay;                 // (R), what this tile's maximum does to older sums
  float* sums;                  // (R, 16), added up at the end
  float* out;                   // (R, D)
  size_t head_size;
};

// The tile's groups; one that no row sees points to one that some row does, so that it can be read.
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
    for_each_block(rows, kTileRows, [&](Range block) {
      with_count<kTileRows>(block.end - block.begin, [&](auto count) {
        product_block<Dot, decltype(count)::value, kTileVectors>(
            state.q + block.begin * state.head_size, state.head_size, right, words, FetchNothing{},
            state.scores + block.begin * kTile + g * kLanes, kTile);
      });
    });
  }
}

template <class Dot>
static void cap_scores(const TileState<Dot>& state, Range rows, float inner) {
  for (size_t at = rows.begin * kTile; at < rows.end * kTile; at += kLanes) {
    float* s = state.scores + at;
    store(s, tanh(mul(load(s), broadcast(inner))));
  }
}

SIMD_INLINE int clamp_lane(int64_t lane) {
  return static_cast<int>(lane < 0 ? 0 : lane > kLanes ? kLanes : lane);
}

// The part of a tile that a row sees, 0 <= begin < end <= kTile.
struct Part {
  int begin, end;
};

// The row's scores of one group, -infinity where it sees nothing.
template <class Dot>
SIMD_INLINE F32x16 seen_scores(const TileState<Dot>& state, size_t row, int g, Part part) {
  const F32x16 s = load(state.scores + row * kTile + g * kLanes);
  if (part.begin == 0 && part.end == kTile) return s;
  return keep_lanes(s, clamp_lane(part.begin - g * kLanes), clamp_lane(part.end - g * kLanes),
                    -std::numeric_limits<float>::infinity());
}

// Brings max up to date, and says how much older sums decay. part_of_row(row) -> Part.
template <class Dot, class PartOfRow>
static void raise_max(const TileState<Dot>& state, Range rows, float outer,
                      const PartOfRow& part_of_row) {
  for (size_t row = rows.begin; row < rows.end; ++row) {
    const Part part = part_of_row(row);
    F32x16 highest = seen_scores(state, row, 0, part);
#pragma GCC unroll 4
    for (int g = 1; g < kTileGroups; ++g) {
      highest = at_least(highest, seen_scores(state, row, g, part));
    }
    state.decay[row] = reduce_max(highest);
  }
  for_each_vector(rows.end - rows.begin, [&](size_t i, auto n) {
    float* max = state.max + rows.begin + i;
    float* decay = state.decay + rows.begin + i;
    const F32x16 old_max = load_lanes(max, n);
    const F32x16 new_max = at_least(mul(load_lanes(decay, n), broadcast(outer)), old_max);
    store_lanes(max, new_max, n);
    store_lanes(decay, exp2_below_overflow(sub(old_max, new_max)), n);
  });
}

// weights = 2^(l - max), added to the decayed sums.
template <class Dot, class PartOfRow>
static void weigh(const TileState<Dot>& state, Range rows, float outer,
                  const PartOfRow& part_of_row) {
  for (size_t row = rows.begin; row < rows.end; ++row) {
    const Part part = part_of_row(row);
    const F32x16 max = broadcast(-state.max[row]);
    F32x16 sum = mul(load(state.sums + row * kLanes), broadcast(state.decay[row]));
#pragma GCC unroll 4
    for (int g = 0; g < kTileGroups; ++g) {
      const F32x16 s = seen_scores(state, row, g, part);
      const F32x16 p = exp2_below_overflow(fma(s, broadcast(outer), max));
      store_left<Dot>(state.weights + row * kTile + g * kLanes, p);
      sum = add(sum, p);
    }
    store(state.sums + row * kLanes, sum);
  }
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
    multiply<Dot>(weights + word * kPer, kTile, rest, static_cast<size_t>(whole - word),
                  FetchNothing{}, acc);
  }
  if (end % kPer != 0) masked(whole, 0x0000ffffu);
}

// out = out * decay + p v for rows that all see [begin, end) of the tile.
template <class Dot, int kRows, int kVectors>
static __attribute__((noinline)) void add_values(const TileState<Dot>& state,
                                                 const TileGroups& groups, size_t row,
                                                 size_t channel, Part part) {
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
  for (int g = part.begin / kLanes; g * kLanes < part.end; ++g) {
    RightView<kVectors> values{{}, stride};
    for (int v = 0; v < kVectors; ++v) values.vectors[v] = groups.values[g] + channel + v * kLanes;
    add_group<Dot>(state.weights + row * kTile + g * kLanes, values,
                   clamp_lane(part.begin - g * kLanes), clamp_lane(part.end - g * kLanes), acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(out + r * stride + v * kLanes, acc[r][v]);
  }
}

template <class Dot>
static void tile_values(const TileState<Dot>& state, const TileGroups& groups, Range rows,
                        Part part) {
  constexpr size_t kStep = kTileVectors * kLanes;
  for_each_block(rows, kTileRows, [&](Range block) {
    with_count<kTileRows>(block.end - block.begin, [&](auto count) {
      constexpr int kRows = decltype(count)::value;
      size_t channel = 0;
      for (; channel + kStep <= state.head_size; channel += kStep) {
        add_values<Dot, kRows, kTileVectors>(state, groups, block.begin, channel, part);
      }
      for (; channel < state.head_size; channel += kLanes) {
        add_values<Dot, kRows, 1>(state, groups, block.begin, channel, part);
      }
    });
  });
}

// Into L2: asking L1 for as much holds up the loads that are due now.
template <class Dot>
static void prefetch_groups(const uint32_t* const (&groups)[kTileGroups], size_t head_size) {
  for (const uint32_t* group : groups) {
    for (size_t at = 0; at < kLanes * head_size * sizeof(typename Dot::Word); at += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(group) + at, 0, 2);
    }
  }
}

// rows: those that see something of the tile. visible(row) -> Visible, in absolute positions.
// next_tile: what to fetch meanwhile, or null.
template <class Dot, class See>
static void attend_tile(const TileState<Dot>& state, const TileGroups& groups, int64_t tile_begin,
                        Range rows, LogitScale scale, const See& visible,
                        const TileGroups* next_tile) {
  const auto part_of_row = [&](size_t row) {
    const Visible seen = visible(row);
    return Part{static_cast<int>(seen.begin > tile_begin ? seen.begin - tile_begin : 0),
                static_cast<int>(seen.end < tile_begin + kTile ? seen.end - tile_begin : kTile)};
  };
  tile_scores(state, groups, rows);
  if (scale.inner != 0) cap_scores(state, rows, scale.inner);
  if (next_tile != nullptr) prefetch_groups<Dot>(next_tile->keys, state.head_size);
  raise_max(state, rows, scale.outer, part_of_row);
  if (next_tile != nullptr) prefetch_groups<Dot>(next_tile->values, state.head_size);
  weigh(state, rows, scale.outer, part_of_row);
  for (size_t first = rows.begin; first < rows.end;) {
    const Part part = part_of_row(first);
    size_t last = first + 1;
    for (; last < rows.end; ++last) {
      const Part next = part_of_row(last);
      if (next.begin != part.begin || next.end != part.end) break;
    }
    tile_values(state, groups, {first, last}, part);
    first = last;
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
