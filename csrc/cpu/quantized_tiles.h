// Groups of decoded codes times rows, by AMX, each group in the order of sums of tiles.h.
//
// Some groups are multiplied one after the other before they are scaled and added: none waits for
// the tiles of the one before. Many rows are multiplied in the blocks of tile_blocks.h. A row alone
// is multiplied in registers instead. All of them give the same bits.

#pragma once

#include "quantized_product.h"
#include "tile_blocks.h"

#ifdef __AMX_BF16__

namespace lora_serve::LORA_SERVE_PATH {

constexpr size_t kMostGroupsAtOnce = 8;

// Decoded words of these groups that lie in L1: 16 KiB of two panels.
constexpr size_t kDecodedWordsAtOnce = 128;

template <>
constexpr size_t kRowsAtOnce<Bfloat16Tiles> = kRowsOfTile;

template <class Codes>
SIMD_INLINE size_t groups_at_once(const QuantizedProduct<Bfloat16Tiles>& product) {
  const size_t words = product.weight.shape.group / kPerWord<Bfloat16>;
  const size_t fit = words < kDecodedWordsAtOnce ? kDecodedWordsAtOnce / words : 1;
  return fit < kMostGroupsAtOnce ? fit : kMostGroupsAtOnce;
}

// sums (rows, kVectors, 16) += scale and offset of group g, the index-th of `numbers`, times its
// `products`.
template <int kVectors>
SIMD_INLINE void add_group(const GroupNumbers<kVectors>& numbers, size_t index, size_t g,
                           const RowSums& rows, size_t num_rows, const float* products,
                           float* sums) {
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 scale = numbers.scale(v, index);
    for (size_t r = 0; r < num_rows; ++r) {
      const size_t at = (r * kVectors + v) * kLanes;
      store(sums + at, fma(scale, load(products + at), load(sums + at)));
    }
    if (rows.data == nullptr) continue;
    const F32x16 offset = numbers.offset(v, index);
    for (size_t r = 0; r < num_rows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(offset, rows.of(r, g), load(sum)));
    }
  }
}

// At most 16 rows times at most kMostGroupsAtOnce groups.
template <class Codes, int kVectors>
static void multiply_groups(const QuantizedProduct<Bfloat16Tiles>& product, Range block,
                            Range groups, const DecodedGroups<kVectors>& decoded, float* sums) {
  constexpr size_t kWords = Decoded<Codes, Bfloat16>::kWords;
  const size_t num_rows = block.end - block.begin;
  const size_t stride = product.left.stride * sizeof(Bfloat16);
  const Bfloat16* left = product.left.data + block.begin * product.left.stride;
  alignas(64) float products[kMostGroupsAtOnce][kRowsOfTile * kVectors * kLanes];
  configure_tiles(num_rows);
  const uint32_t* words_at = decoded.words;
  for (size_t g = groups.begin; g < groups.end; ++g) {
    const Range units = units_of_group<Codes>(product.weight.shape, g);
    const size_t num_words = (units.end - units.begin) * kWords;
    RightView<kVectors> right{{}, kVectors * kLanes};
    for (int v = 0; v < kVectors; ++v) right.vectors[v] = words_at + v * kLanes;
    clear_tiles<kVectors>();
    multiply_tiles<kVectors>({left + units.begin * Codes::kPerUnit, stride}, num_rows, right,
                             num_words, FetchNothing{});
    store_sums<kVectors>(products[g - groups.begin], kVectors * kLanes);
    words_at += num_words * kVectors * kLanes;
  }
  for (size_t g = groups.begin; g < groups.end; ++g) {
    const size_t index = g - groups.begin;
    add_group(decoded.numbers, index, g, product.sums.from(block.begin), num_rows, products[index],
              sums);
  }
}

// Groups that a block of rows multiplies before it scales and adds them: 16 KiB of products.
constexpr size_t kMostGroupsOfBlock = 4;

// Whether all groups are whole steps of so many words.
SIMD_INLINE bool has_whole_steps(const QuantizedShape& shape, size_t width, int words) {
  const size_t step = words * kPerWord<Bfloat16>;
  return shape.group % step == 0 && width % step == 0;
}

// sums (num_rows, 2, 16) += scale and offset times products of kGroups groups from g on, whose
// numbers these are. In the order of groups, as if they came one by one.
template <int kGroups, bool kHasOffsets, size_t kSums>
SIMD_INLINE void add_groups_to(const GroupNumbers<kPair>& numbers, size_t g, const RowSums& rows,
                               size_t num_rows, const float (*products)[kSums], float* sums) {
  F32x16 scales[kGroups][kPair], offsets[kGroups][kPair];
#pragma GCC unroll 4
  for (int i = 0; i < kGroups; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < static_cast<int>(kPair); ++v) {
      scales[i][v] = numbers.scale(v, i);
      if (kHasOffsets) offsets[i][v] = numbers.offset(v, i);
    }
  }
  for (size_t r = 0; r < num_rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < static_cast<int>(kPair); ++v) {
      const size_t at = r * kSumsOfRow + v * kLanes;
      F32x16 sum = load(sums + at);
#pragma GCC unroll 4
      for (int i = 0; i < kGroups; ++i) {
        sum = fma(scales[i][v], load(products[i] + at), sum);
        if (kHasOffsets) sum = fma(offsets[i][v], rows.of(r, g + i), sum);
      }
      store(sums + at, sum);
    }
  }
}

template <int kGroups, size_t kSums>
static void add_groups(const GroupNumbers<kPair>& numbers, size_t g, const RowSums& rows,
                       size_t num_rows, const float (*products)[kSums], float* sums) {
  if (rows.data == nullptr) {
    add_groups_to<kGroups, false>(numbers, g, rows, num_rows, products, sums);
  } else {
    add_groups_to<kGroups, true>(numbers, g, rows, num_rows, products, sums);
  }
}

// Whole blocks of 32 rows times at most kMostGroupsOfBlock groups of a pair of panels. All groups
// are whole steps. Emerald Rapids, 2 shared cores, November 2026, 512 rows, 896 to 9,728: 5.7 ms of
// int8 in groups of 128 and 8.5 of int4 in groups of 32; 16 rows at a time 9.8 and 13.4.
template <class Codes>
static void multiply_groups_in_blocks(const QuantizedProduct<Bfloat16Tiles>& product, Range rows,
                                      Range groups, const DecodedGroups<kPair>& decoded,
                                      float* sums) {
  constexpr size_t kWords = Decoded<Codes, Bfloat16>::kWords;
  const size_t stride = product.left.stride * sizeof(Bfloat16);
  alignas(64) float products[kMostGroupsOfBlock][kSumsOfBlock];
  configure_whole_tiles();
  for (size_t row = rows.begin; row < rows.end; row += kRowsOfBlock, sums += kSumsOfBlock) {
    const Bfloat16* left = product.left.data + row * product.left.stride;
    const uint32_t* words_at = decoded.words;
    for (size_t g = groups.begin; g < groups.end; ++g) {
      const Range units = units_of_group<Codes>(product.weight.shape, g);
      const size_t num_words = (units.end - units.begin) * kWords;
      clear_tiles<4>();
      multiply_tile_block(
          {{left + units.begin * Codes::kPerUnit, stride}, words_at, num_words / kTileWords},
          {nullptr, 0});
      store_block_sums(products[g - groups.begin]);
      words_at += num_words * kPair * kLanes;
    }
    with_count<kMostGroupsOfBlock>(groups.end - groups.begin, [&](auto count) {
      add_groups<decltype(count)::value>(decoded.numbers, groups.begin, product.sums.from(row),
                                         kRowsOfBlock, products, sums);
    });
  }
}

// The words of a step of tiles, `kStep` of each of a pair of panels, from unit `u` on.
template <class Codes, int kStep>
SIMD_INLINE void decode_step(const CodeView<kPair>& view, size_t u, uint32_t* to) {
  using Decode = Decoded<Codes, Bfloat16>;
#pragma GCC unroll 8
  for (int i = 0; i < kStep / Decode::kWords; ++i) {
    view.template fetch_unit_ahead<Codes>(u + i);
#pragma GCC unroll 2
    for (int v = 0; v < static_cast<int>(kPair); ++v) {
      const Decode decoded = Decode::of(Codes::load(view.template unit_at<Codes>(v, u + i)));
#pragma GCC unroll 16
      for (int k = 0; k < Decode::kWords; ++k) {
        store_words(to + ((i * Decode::kWords + k) * kPair + v) * kLanes, Decode::word(decoded, k));
      }
    }
  }
}

// At most 16 rows times a pair of panels, whose groups are whole steps of kStep words. Tiles
// multiply a step while vectors decode the one after the next, and memory is asked for codes all
// the while. Emerald Rapids, 1 shared core, November 2026, 8 rows, 896 to 4,864 from memory: 315 us
// of int8 in groups of 128 and 284 of int4 in groups of 32; a stretch decoded, then multiplied,
// takes 440 and 451.
template <class Codes, int kStep>
static void multiply_while_decoding(const QuantizedProduct<Bfloat16Tiles>& product, Range rows,
                                    const CodeView<kPair>& view, float* sums) {
  constexpr size_t kUnits = kStep / Decoded<Codes, Bfloat16>::kWords, kWords = kPair * kLanes;
  constexpr size_t kAhead = 2, kKept = 4;  // steps; those in between are still being multiplied
  const size_t num_rows = rows.end - rows.begin, all = view.shape.groups();
  const size_t stride = product.left.stride * sizeof(Bfloat16), units = view.shape.units();
  const Bfloat16* left = product.left.data + rows.begin * product.left.stride;
  alignas(64) uint32_t steps[kKept][kStep * kWords];
  alignas(64) float products[kMostGroupsOfBlock][kRowsOfTile * kWords];
  NextNumbers<kPair> next;
  configure_tiles(num_rows);
  for (size_t i = 0; i < kAhead && i * kUnits < units; ++i) {
    decode_step<Codes, kStep>(view, i * kUnits, steps[i]);
  }
  size_t u = 0, at = 0;
  for (size_t first = 0; first < all; first += kMostGroupsOfBlock) {
    const size_t end = first + kMostGroupsOfBlock < all ? first + kMostGroupsOfBlock : all;
    const auto numbers = widen_numbers(view, {first, end}, next.scales, next.offsets);
    for (size_t g = first; g < end; ++g) {
      const size_t units_end = units_of_group<Codes>(view.shape, g).end;
      clear_tiles<kPair>();
      for (; u < units_end; u += kUnits, at = (at + 1) % kKept) {
        if (u + kAhead * kUnits < units) {
          decode_step<Codes, kStep>(view, u + kAhead * kUnits, steps[(at + kAhead) % kKept]);
        }
        const TileRows of_rows{left + u * Codes::kPerUnit, stride};
        const RightView<kPair> right{{steps[at], steps[at] + kLanes}, kWords};
        settle(steps);
        if constexpr (kStep == kTileWords) {
          multiply_tile<kPair>(of_rows, right, 0, kWords * sizeof(uint32_t));
        } else {
          multiply_half_tile<kPair>(of_rows, right, 0, kWords * sizeof(uint32_t));
        }
      }
      store_sums<kPair>(products[g - first], kWords);
    }
    with_count<kMostGroupsOfBlock>(end - first, [&](auto count) {
      add_groups<decltype(count)::value>(numbers, first, product.sums.from(rows.begin), num_rows,
                                         products, sums);
    });
  }
}

// Whether it can, and did.
template <class Codes>
SIMD_INLINE bool multiplied_while_decoding(const QuantizedProduct<Bfloat16Tiles>& product,
                                           Range rows, const CodeView<kPair>& view, float* sums) {
  if (rows.end - rows.begin > kRowsOfTile) return false;
  const size_t width = view.shape.units() * Codes::kPerUnit;
  if (has_whole_steps(view.shape, width, kTileWords)) {
    multiply_while_decoding<Codes, kTileWords>(product, rows, view, sums);
    return true;
  }
  if constexpr (Decoded<Codes, Bfloat16>::kWords <= kHalfTileWords) {
    constexpr size_t kHalf = kHalfTileWords * kPerWord<Bfloat16>;
    if (view.shape.group == kHalf && has_whole_steps(view.shape, width, kHalfTileWords)) {
      multiply_while_decoding<Codes, kHalfTileWords>(product, rows, view, sums);
      return true;
    }
  }
  return false;
}

// While it lives, denormals are zero, as they are to tiles.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : before_(_mm_getcsr()) { set(before_ | 0x8040); }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;
  ~DenormalsAreZero() { set(before_); }

 private:
  // The compiler knows of no order between this and arithmetic, but between this and memory.
  static void set(unsigned control) {
    asm volatile("" : : : "memory");
    _mm_setcsr(control);
    asm volatile("" : : : "memory");
  }

  unsigned before_;
};

// The codes of the unit at `words`.
template <class Codes>
struct UnitAt {
  typename Codes::Unit unit;

  explicit UnitAt(const uint32_t* words) : unit(Codes::load(words)) {}
  F32x16 value(int k) const { return Codes::value(unit, k); }
};

// Nibbles lie at other places of words that are loaded from their second byte on: half the shifts,
// of which the processor does one in a cycle. Reads up to three bytes behind the words.
struct NibblesAt {
  const char* bytes;

  explicit NibblesAt(const uint32_t* words) : bytes(reinterpret_cast<const char*>(words)) {}
  F32x16 value(int k) const {
    const int nibble = k % 2 * 4 + k / 2;
    return centred_nibble({_mm512_loadu_si512(bytes + nibble / 2)}, nibble % 2);
  }
};

template <class Codes, bool kIsLast>
struct UnitOfRow {
  using Type = UnitAt<Codes>;
};

template <>
struct UnitOfRow<FourBits, false> {
  using Type = NibblesAt;
};

// chains[0] += lower, chains[1] += upper elements of one unit of codes.
template <class Codes, bool kIsLast, int kVectors>
SIMD_INLINE void add_unit(const float* left, const CodeView<kVectors>& view, size_t u,
                          F32x16 (&chains)[2][kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const typename UnitOfRow<Codes, kIsLast>::Type unit(view.template unit_at<Codes>(v, u));
#pragma GCC unroll 32
    for (int k = 0; k < Codes::kPerUnit; ++k) {
      F32x16& chain = chains[k % 2][v];
      chain = fma(broadcast(left[u * Codes::kPerUnit + k]), unit.value(k), chain);
    }
  }
}

// What a tile adds to its sums in a step of these units: one chain of lower and one of upper
// elements.
template <class Codes, int kVectors>
SIMD_INLINE void add_step(const float* left, const CodeView<kVectors>& view, Range units,
                          F32x16 (&acc)[1][kVectors]) {
  F32x16 chains[2][kVectors];
  clear(chains);
  const bool has_last = units.end == view.shape.units();
  const size_t end = has_last ? units.end - 1 : units.end;
  for (size_t u = units.begin; u < end; ++u) {
    view.template fetch_unit_ahead<Codes>(u);
    add_unit<Codes, false>(left, view, u, chains);
  }
  if (has_last) add_unit<Codes, true>(left, view, end, chains);
  constexpr size_t kUnitsOfHalf = kTileWords / 2 * kPerWord<Bfloat16> / Codes::kPerUnit;
  const bool is_filled_up = units.end - units.begin < kUnitsOfHalf;  // by a tile, with zeros
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    if (is_filled_up) {  // a zero makes -0, to which sums may have been flushed, +0
      for (auto& chain : chains) chain[v] = add(chain[v], zero());
    }
    acc[0][v] = add(acc[0][v], add(chains[0][v], chains[1][v]));
  }
}

// What the codes of one group add to one row's sums.
template <class Codes, int kVectors>
SIMD_INLINE void multiply_group_as_tiles(const float* left, const CodeView<kVectors>& view,
                                         Range units, float* products) {
  constexpr size_t kUnitsOfStep = kTileWords * kPerWord<Bfloat16> / Codes::kPerUnit;
  F32x16 acc[1][kVectors];
  clear(acc);
  for (size_t step = kUnitsOfStep; units.begin < units.end;) {
    const size_t left_over = units.end - units.begin;
    if (left_over < step) step = left_over < kUnitsOfStep / 2 ? left_over : kUnitsOfStep / 2;
    add_step<Codes>(left, view, {units.begin, units.begin + step}, acc);
    units.begin += step;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) store(products + v * kLanes, acc[0][v]);
}

// One row, in the order of tiles but in registers: a tile would wait longer for its codes than they
// take to be multiplied. Emerald Rapids, 1 shared core, November 2026, 896 to 896 from L2: 28 us of
// int8 and 26 of int4, by tiles 41 and 44.
template <class Codes, int kVectors>
static __attribute__((noinline)) void multiply_row_as_tiles(const float* left,
                                                            const CodeView<kVectors>& view,
                                                            const RowSums& rows, float* sums) {
  constexpr size_t kGroupsAtOnce = NextNumbers<kVectors>::kGroups;
  NextNumbers<kVectors> next;
  alignas(64) float products[kGroupsAtOnce][kVectors * kLanes];
  F32x16 total[1][kVectors];
  clear(total);
  for (size_t first = 0, all = view.shape.groups(); first < all; first += kGroupsAtOnce) {
    const size_t end = first + kGroupsAtOnce < all ? first + kGroupsAtOnce : all;
    {
      const DenormalsAreZero scope;
      for (size_t g = first; g < end; ++g) {
        multiply_group_as_tiles<Codes>(left, view, units_of_group<Codes>(view.shape, g),
                                       products[g - first]);
      }
    }
    const auto numbers = widen_numbers(view, {first, end}, next.scales, next.offsets);
    for (size_t g = first; g < end; ++g) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F32x16 product = load(products[g - first] + v * kLanes);
        total[0][v] = fma(numbers.scale(v, g - first), product, total[0][v]);
        if (rows.data == nullptr) continue;
        total[0][v] = fma(numbers.offset(v, g - first), rows.of(0, g), total[0][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) store(sums + v * kLanes, total[0][v]);
}

// The call has no other row, since for_each_block cuts evenly: none is left over alone.
template <class Codes, int kRows, int kVectors>
static void multiply_few(const QuantizedProduct<Bfloat16Tiles>& product, size_t,
                         const CodeView<kVectors>& view, float* sums) {
  static_assert(kRows == 1, "tiles multiply more");
  multiply_row_as_tiles<Codes>(product.widened, view, product.sums, sums);
}

}  // namespace lora_serve::LORA_SERVE_PATH

#endif
