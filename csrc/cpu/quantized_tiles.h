// Groups of decoded codes times rows, by AMX, each group in the order of sums of tiles.h.
//
// Some groups are multiplied one after the other before they are scaled and added: none waits for
// the tiles of the one before. A row alone is multiplied in registers instead, to the same bits.

#pragma once

#include "quantized_product.h"
#include "tiles.h"

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

// sums (rows, kVectors, 16) += scale and offset of group g times its `products`.
template <int kVectors>
SIMD_INLINE void add_group(const CodeView<kVectors>& view, size_t g, const RowSums& rows,
                           size_t num_rows, const float* products, float* sums) {
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 scale = view.scale(v, g);
    for (size_t r = 0; r < num_rows; ++r) {
      const size_t at = (r * kVectors + v) * kLanes;
      store(sums + at, fma(scale, load(products + at), load(sums + at)));
    }
    if (rows.data == nullptr) continue;
    const F32x16 offset = view.offset(v, g);
    for (size_t r = 0; r < num_rows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(offset, rows.of(r, g), load(sum)));
    }
  }
}

// At most 16 rows times at most kMostGroupsAtOnce groups, whose words lie at `decoded`.
template <class Codes, int kVectors>
static void multiply_groups(const QuantizedProduct<Bfloat16Tiles>& product, Range block,
                            Range groups, const uint32_t* decoded,
                            const CodeView<kVectors>& view, float* sums) {
  constexpr size_t kWords = Decoded<Codes, Bfloat16>::kWords;
  const size_t num_rows = block.end - block.begin;
  const size_t stride = product.left.stride * sizeof(Bfloat16);
  const Bfloat16* left = product.left.data + block.begin * product.left.stride;
  alignas(64) float products[kMostGroupsAtOnce][kRowsOfTile * kVectors * kLanes];
  configure_tiles(num_rows);
  for (size_t g = groups.begin; g < groups.end; ++g) {
    const Range words = words_of_group<Codes>(product.weight.shape, g);
    const size_t num_words = (words.end - words.begin) * kWords;
    RightView<kVectors> right{{}, kVectors * kLanes};
    for (int v = 0; v < kVectors; ++v) right.vectors[v] = decoded + v * kLanes;
    clear_tiles<kVectors>();
    multiply_tiles<kVectors>({left + words.begin * Codes::kPerWord, stride}, num_rows, right,
                             num_words, FetchNothing{});
    store_sums<kVectors>(products[g - groups.begin], kVectors * kLanes);
    decoded += num_words * kVectors * kLanes;
  }
  for (size_t g = groups.begin; g < groups.end; ++g) {
    add_group(view, g, product.sums.from(block.begin), num_rows, products[g - groups.begin], sums);
  }
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

// Code k of the words at `words`. Nibbles lie at other places of words that are loaded from their
// second byte on: half the shifts, of which the processor does one in a cycle.
template <class Codes>
struct CodeAt {
  SIMD_INLINE F32x16 value(const uint32_t* words, int k) {
    return Codes::value(load_words(words), k);
  }
};

// Reads up to three bytes behind the words.
template <>
struct CodeAt<FourBits> {
  SIMD_INLINE F32x16 value(const uint32_t* words, int k) {
    const int nibble = k % 2 * 4 + k / 2;
    const char* bytes = reinterpret_cast<const char*>(words) + nibble / 2;
    return centred_nibble({_mm512_loadu_si512(bytes)}, nibble % 2);
  }
};

// chains[0] += lower, chains[1] += upper elements of one word of codes.
template <class Codes, bool kIsLast, int kVectors>
SIMD_INLINE void add_word(const float* left, const CodeView<kVectors>& view, size_t word,
                          F32x16 (&chains)[2][kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t* codes = view.codes[v] + word * kLanes;
#pragma GCC unroll 8
    for (int k = 0; k < Codes::kPerWord; ++k) {
      const F32x16 code =
          kIsLast ? Codes::value(load_words(codes), k) : CodeAt<Codes>::value(codes, k);
      F32x16& chain = chains[k % 2][v];
      chain = fma(broadcast(left[word * Codes::kPerWord + k]), code, chain);
    }
  }
}

// What a tile adds to its sums in a step of these words: one chain of lower and one of upper
// elements.
template <class Codes, int kVectors>
SIMD_INLINE void add_step(const float* left, const CodeView<kVectors>& view, Range words,
                          F32x16 (&acc)[1][kVectors]) {
  F32x16 chains[2][kVectors];
  clear(chains);
  const bool has_last = words.end == view.num_words;
  const size_t end = has_last ? words.end - 1 : words.end;
  for (size_t w = words.begin; w < end; ++w) {
    view.fetch_ahead(w);
    add_word<Codes, false>(left, view, w, chains);
  }
  if (has_last) add_word<Codes, true>(left, view, end, chains);
  constexpr size_t kWordsOfHalf = kTileWords / 2 * kPerWord<Bfloat16> / Codes::kPerWord;
  const bool is_filled_up = words.end - words.begin < kWordsOfHalf;  // by a tile, with zeros
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    if (is_filled_up) {  // a zero makes -0, to which sums may have been flushed, +0
      for (auto& chain : chains) chain[v] = add(chain[v], zero());
    }
    acc[0][v] = add(acc[0][v], add(chains[0][v], chains[1][v]));
  }
}

// One row, in the order of tiles but in registers: a tile would wait longer for its codes than they
// take to be multiplied. Emerald Rapids, 1 shared core, November 2026, 896 to 896 from L2: 28 us of
// int8 and 26 of int4, by tiles 41 and 44.
template <class Codes, int kVectors>
static __attribute__((noinline)) void multiply_row_as_tiles(const float* left,
                                                            const QuantizedShape& shape,
                                                            const CodeView<kVectors>& view,
                                                            const RowSums& rows, float* sums) {
  constexpr size_t kWordsOfStep = kTileWords * kPerWord<Bfloat16> / Codes::kPerWord;
  constexpr size_t kGroupsAtOnce = 16;
  alignas(64) float products[kGroupsAtOnce][kVectors * kLanes];
  std::memset(sums, 0, kVectors * kLanes * sizeof(float));
  for (size_t first = 0; first < shape.groups(); first += kGroupsAtOnce) {
    const size_t behind = first + kGroupsAtOnce;
    const size_t end = behind < shape.groups() ? behind : shape.groups();
    {
      const DenormalsAreZero scope;
      for (size_t g = first; g < end; ++g) {
        Range words = words_of_group<Codes>(shape, g);
        F32x16 acc[1][kVectors];
        clear(acc);
        for (size_t step = kWordsOfStep; words.begin < words.end;) {
          const size_t left_over = words.end - words.begin;
          if (left_over < step) step = left_over < kWordsOfStep / 2 ? left_over : kWordsOfStep / 2;
          add_step<Codes>(left, view, {words.begin, words.begin + step}, acc);
          words.begin += step;
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(products[g - first] + v * kLanes, acc[0][v]);
      }
    }
    for (size_t g = first; g < end; ++g) add_group(view, g, rows, 1, products[g - first], sums);
  }
}

// The call has no other row, since for_each_block cuts evenly: none is left over alone.
template <class Codes, int kRows, int kVectors>
static void multiply_few(const QuantizedProduct<Bfloat16Tiles>& product, size_t,
                         const CodeView<kVectors>& view, float* sums) {
  static_assert(kRows == 1, "tiles multiply more");
  multiply_row_as_tiles<Codes>(product.widened, product.weight.shape, view, product.sums, sums);
}

}  // namespace lora_serve::LORA_SERVE_PATH

#endif
