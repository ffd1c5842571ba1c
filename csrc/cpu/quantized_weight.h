// Quantised weights: small whole numbers, and a scale for each group of them along a row.
//
//   weight[n][k] ~ scale[n][k / G] * code[n][k] + offset[n][k / G]
//
// N outputs, K inputs, G codes to a group. Codes are in [-128, 127] (8 bits) or [-8, 7] (4 bits).
// quantize.h chooses them, but never -128, and scales in bfloat16 without offsets. Those that a
// checkpoint holds have scales, and maybe offsets, in float. Panels hold 16 outputs, as in
// packing.h; each is its scales, [group][lane], or scales and offsets, [group][2][lane], padded to
// 64 bytes, and then its codes in words of 32 bits, [word][lane]:
//
//   8 bits, 4 to a word: byte i is code[k + i]
//   4 bits, 8 to a word: nibbles 0 to 7 are code[k + 0, 2, 4, 6, 1, 3, 5, 7] + 8
//
// so that the two halves of a word hold neighbours. A group is a whole number of words, but the
// last one of a row may be shorter. Padding is the code 0. The same on every path.

#pragma once

#include "dtype.h"

namespace lora_serve {

constexpr size_t kMaxGroup = 256;  // bounds what a kernel keeps of a group on its stack

enum class Scales { kBfloat16, kFloat, kFloatWithOffset };

// What the numbers of a packed weight are, without the numbers.
struct QuantizedShape {
  int bits;  // 8 or 4
  size_t group, out_features, in_features;
  Scales scales = Scales::kBfloat16;

  size_t per_word() const { return bits == 8 ? 4 : 8; }
  size_t words() const { return ceil_div(in_features, per_word()); }
  size_t groups() const { return ceil_div(in_features, group); }
  size_t panels() const { return ceil_div(out_features, kLanes); }
  bool has_offsets() const { return scales == Scales::kFloatWithOffset; }
  // Of one group of a panel, in 16 lanes: half a word, or one or two words, to a lane.
  size_t group_words() const {
    return scales == Scales::kBfloat16 ? kLanes / 2 : has_offsets() ? 2 * kLanes : kLanes;
  }
  size_t scale_words() const { return round_up(groups() * group_words(), kLanes); }
  size_t panel_words() const { return scale_words() + words() * kLanes; }
  size_t packed_words() const { return panels() * panel_words(); }
};

struct QuantizedWeight {
  QuantizedShape shape;
  const uint32_t* packed;

  // Scales, and offsets.
  const uint32_t* numbers(size_t panel) const { return packed + panel * shape.panel_words(); }
  const Bfloat16* scales(size_t panel) const {
    return reinterpret_cast<const Bfloat16*>(numbers(panel));
  }
  const uint32_t* codes(size_t panel) const {
    return packed + panel * shape.panel_words() + shape.scale_words();
  }
};

}  // namespace lora_serve
