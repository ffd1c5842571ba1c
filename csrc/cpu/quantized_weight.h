// Quantised weights: small whole numbers, and a scale for each group of them along a row.
//
//   weight[n][k] ~ scale[n][k / G] * code[n][k] + offset[n][k / G]
//
// N outputs, K inputs, G codes to a group. Codes of b bits are in [-2^(b-1), 2^(b-1) - 1].
// quantize.h chooses those of 8 and 4 bits, but never -128, and scales in bfloat16 without offsets.
// Those that a checkpoint holds have any scales, and maybe offsets. Panels hold 16 outputs, as in
// packing.h; each is its scales, then its offsets, both as group_numbers.h has them and padded to
// 64 bytes, and then its codes in words of 32 bits, [word][lane]:
//
//   8 bits, 4 to a word: byte i is code[k + i]
//   4 bits, 8 to a word: nibbles 0 to 7 are code[k + 0, 2, 4, 6, 1, 3, 5, 7] + 8
//   6 bits, 16 to three words: four fours of codes, four[f] with code[k + 4 f + 0, 2, 1, 3] + 32 in
//           its bytes. The low six bits of a byte of word w are four[w]'s; the two above them are
//           two bits of four[3], the lowest first
//   5 bits, 32 to five words: eight fours, with 16 added to each code. The low five bits of a byte
//           of word w are four[w]'s; the three above them
//             w = 0: four[5], bits 0 to 2     w = 1: four[5], bits 3, 4; four[7], bit 3
//             w = 2: four[6], bits 0 to 2     w = 3: four[6], bits 3, 4; four[7], bit 4
//             w = 4: four[7], bits 0 to 2
//
// so that the two halves of a word of less than 8 bits hold neighbours. A group is a whole number
// of such units, but the last one of a row may be shorter where codes have 8 or 4 bits. Padding is
// the code 0. The same on every path.

#pragma once

#include "dtype.h"

namespace lora_serve {

constexpr size_t kMaxGroup = 256;  // bounds what a kernel keeps of a group on its stack

// How the numbers of groups are stored: 16 lanes of one group after the other.
enum class Stored : int {
  kNothing,
  kBytes,     // whole numbers, in one byte
  kUnits,     // likewise, times a float16 that the groups of a block of columns share
  kBfloat16,
  kFloat16,
  kFloat,
};

// block: of kUnits, columns that share one; a multiple of the group.
struct NumberForm {
  Stored stored = Stored::kNothing;
  size_t block = 0;
};

// What the numbers of a packed weight are, without the numbers.
struct QuantizedShape {
  int bits;  // 8, 6, 5 or 4
  size_t group, out_features, in_features;
  NumberForm scales = {Stored::kBfloat16};
  NumberForm offsets = {};

  // Codes are packed in units of whole words.
  size_t per_unit() const { return bits == 8 ? 4 : bits == 6 ? 16 : bits == 5 ? 32 : 8; }
  size_t unit_words() const { return bits == 6 ? 3 : bits == 5 ? 5 : 1; }
  size_t units() const { return ceil_div(in_features, per_unit()); }
  size_t words() const { return units() * unit_words(); }
  size_t groups() const { return ceil_div(in_features, group); }
  size_t panels() const { return ceil_div(out_features, kLanes); }
  bool has_offsets() const { return offsets.stored != Stored::kNothing; }

  size_t blocks(NumberForm form) const { return ceil_div(in_features, form.block); }
  // Those of 16 lanes of all groups.
  size_t number_words(NumberForm form) const {
    constexpr size_t kHalves = kLanes / 2, kBytes = kLanes / 4;
    switch (form.stored) {
      case Stored::kNothing:
        return 0;
      case Stored::kBytes:
        return groups() * kBytes;
      case Stored::kUnits:
        return blocks(form) * kHalves + groups() * kBytes;
      case Stored::kBfloat16:
      case Stored::kFloat16:
        return groups() * kHalves;
      case Stored::kFloat:
        return groups() * kLanes;
    }
    return 0;
  }
  // Offsets that are stored as halves or units are less by a multiple of the scale, which 16 floats
  // before them name: it is the same along a row.
  static bool is_shifted(NumberForm offsets) {
    return offsets.stored == Stored::kUnits || offsets.stored == Stored::kFloat16;
  }
  size_t scale_words_in(NumberForm form) const { return round_up(number_words(form), kLanes); }
  size_t offset_words_in(NumberForm form) const {
    return scale_words_in(form) + (is_shifted(form) ? kLanes : 0);
  }

  size_t scale_words() const { return scale_words_in(scales); }
  size_t offset_words() const { return offset_words_in(offsets); }
  size_t panel_words() const { return scale_words() + offset_words() + words() * kLanes; }
  size_t packed_words() const { return panels() * panel_words(); }
};

struct QuantizedWeight {
  QuantizedShape shape;
  const uint32_t* packed;

  const uint32_t* scales(size_t panel) const { return packed + panel * shape.panel_words(); }
  const uint32_t* offsets(size_t panel) const { return scales(panel) + shape.scale_words(); }
  const uint32_t* codes(size_t panel) const { return offsets(panel) + shape.offset_words(); }
  // Where they are stored so.
  const Bfloat16* bfloat16_scales(size_t panel) const {
    return reinterpret_cast<const Bfloat16*>(scales(panel));
  }
};

}  // namespace lora_serve
