// Weights into codes and scales, each group of a row by itself, packed as in quantized_weight.h.
//
//   8 bits: scale = max |w| / 127       4 bits: scale = w / -8, w the one that is farthest from 0
//   code = w / scale, rounded to whole numbers, ties to even, and cut to what the bits hold
//
// scale is rounded to bfloat16 before it divides. A group that holds an infinity or a NaN has the
// scale NaN; where a scale is zero or not finite, codes are 0. Every number comes from one
// operation of IEEE 754 after another: every path finds the bits of lora_serve/ops/quantization.py.

#pragma once

#include <cmath>

#include "exact_numbers.h"
#include "integers.h"
#include "kernels.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

// By whole numbers: vcvtneps2bf16 would take denormals for zero.
static inline Bfloat16 nearest_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

static inline float widened(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// The scale of `width` weights.
template <class T>
static Bfloat16 group_scale(const T* weight, size_t width, int bits) {
  F32x16 high = zero(), low = zero(), poison = zero();
  for_each_vector(width, [&](size_t k, auto n) {
    const F32x16 w = load_lanes(weight + k, n);
    high = at_least(w, high);
    low = at_least(sub(zero(), w), low);
    poison = fma(w, zero(), poison);  // NaN from here on if w is not finite
  });
  if (reduce_add(poison) != 0.0f) return {0x7fc0};
  const float highest = reduce_max(high), lowest = -reduce_max(low);
  const float largest = -lowest > highest ? lowest : highest;
  return nearest_bfloat16(bits == 8 ? std::fabs(largest) / 127.0f : largest / -8.0f);
}

// What a byte is larger by than its code.
static constexpr int byte_offset(int bits) { return bits == 8 ? 0 : 8; }

// Bytes of the codes of one group; those after its end are of code 0.
template <class T>
static void group_bytes(const T* weight, size_t width, int bits, float scale,
                        int8_t (&bytes)[kMaxGroup]) {
  std::memset(bytes, byte_offset(bits), sizeof bytes);
  if (scale == 0.0f || !std::isfinite(scale)) return;
  const F32x16 step = broadcast(scale), offset = broadcast(static_cast<float>(byte_offset(bits))),
               least = broadcast(bits == 8 ? -127.0f : -8.0f),
               most = broadcast(bits == 8 ? 127.0f : 7.0f);
  for_each_vector(width, [&](size_t k, auto n) {
    const F32x16 code = round_to_integer(div(load_lanes(weight + k, n), step));
    store_bytes(bytes + k, add(at_most(at_least(code, least), most), offset));
  });
}

// Eight bytes below 16 as nibbles in the order of quantized_weight.h.
SIMD_INLINE uint32_t nibbles_of(uint64_t bytes) {
  const auto every_other = [](uint64_t x) {
    x &= 0x000f000f000f000full;
    x = (x | x >> 12) & 0x000000ff000000ffull;
    return static_cast<uint32_t>(x | x >> 24) & 0xffffu;
  };
  return every_other(bytes) | every_other(bytes >> 8) << 16;
}

// One lane's words.
static inline void pack_bytes(const int8_t* bytes, size_t num_words, int bits, uint32_t* to) {
  for (size_t w = 0; w < num_words; ++w) {
    if (bits == 8) {
      std::memcpy(to + w * kLanes, bytes + 4 * w, 4);
    } else {
      uint64_t eight;
      std::memcpy(&eight, bytes + 8 * w, 8);
      to[w * kLanes] = nibbles_of(eight);
    }
  }
}

template <class T>
static void quantize_panel(const QuantizeCall& call, size_t panel) {
  const QuantizedShape& shape = call.shape;
  const size_t words_per_group = shape.group / shape.per_unit(), width = shape.in_features;
  uint32_t* scales_to = call.packed + panel * shape.panel_words();
  std::memset(scales_to, 0, shape.scale_words() * sizeof(uint32_t));
  Bfloat16* scales = reinterpret_cast<Bfloat16*>(scales_to);
  uint32_t* words = scales_to + shape.scale_words();
  for (size_t g = 0; g < shape.groups(); ++g, words += words_per_group * kLanes) {
    const size_t begin = g * shape.group;
    const size_t count = begin + shape.group < width ? shape.group : width - begin;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const size_t row = panel * kLanes + lane;
      const bool is_row = row < shape.out_features;
      const T* weight = static_cast<const T*>(call.weight) + (is_row ? row * width + begin : 0);
      const size_t here = is_row ? count : 0;
      const Bfloat16 scale = group_scale(weight, here, shape.bits);
      scales[g * kLanes + lane] = scale;
      int8_t bytes[kMaxGroup];
      group_bytes(weight, here, shape.bits, widened(scale), bytes);
      pack_bytes(bytes, ceil_div(count, shape.per_unit()), shape.bits, words + lane);
    }
  }
}

template <class T>
static void quantize_of(const QuantizeCall& call, Workers& workers) {
  for_each_task(workers.team(true), call.shape.panels(),
                [&](size_t panel, int) { quantize_panel<T>(call, panel); });
}

// Four codes of five or six bits, with 16 or 32 added to each, the middle ones in the other order.
static inline uint32_t four_of(const int8_t* codes, uint32_t added) {
  uint32_t four;
  std::memcpy(&four, codes, sizeof four);
  four = (four & 0xff0000ffu) | (four & 0x0000ff00u) << 8 | (four >> 8 & 0x0000ff00u);
  return (four ^ 0x80808080u) - (0x80808080u - added * 0x01010101u);  // no byte borrows
}

// Sixteen codes of six bits as three words.
static inline void six_bit_words(const int8_t* codes, uint32_t* words) {
  uint32_t fours[4];
  for (int f = 0; f < 4; ++f) fours[f] = four_of(codes + 4 * f, 32);
  for (int w = 0; w < 3; ++w) words[w] = fours[w] | (fours[3] >> 2 * w & 0x03030303u) << 6;
}

// 32 codes of five bits as five words.
static inline void five_bit_words(const int8_t* codes, uint32_t* words) {
  uint32_t fours[8];
  for (int f = 0; f < 8; ++f) fours[f] = four_of(codes + 4 * f, 16);
  const auto above = [&](int f, int first, uint32_t mask) {
    return (fours[f] >> first & mask) << 5;
  };
  constexpr uint32_t kThree = 0x07070707u, kTwo = 0x03030303u, kOne = 0x01010101u;
  words[0] = fours[0] | above(5, 0, kThree);
  words[1] = fours[1] | above(5, 3, kTwo) | above(7, 3, kOne) << 2;
  words[2] = fours[2] | above(6, 0, kThree);
  words[3] = fours[3] | above(6, 3, kTwo) | above(7, 4, kOne) << 2;
  words[4] = fours[4] | above(7, 0, kThree);
}

// `count` codes of a row in words; those after its end are of code 0.
static inline void code_words(const int8_t* codes, size_t count, int bits, uint32_t* words) {
  if (bits == 6) {
    for (size_t k = 0; k < count; k += 16, words += 3) six_bit_words(codes + k, words);
    return;
  }
  if (bits == 5) {
    for (size_t k = 0; k < count; k += 32, words += 5) five_bit_words(codes + k, words);
    return;
  }
  if (bits == 8) {
    words[(count - 1) / 4] = 0;
    std::memcpy(words, codes, count);
    return;
  }
  // A nibble that is 8 larger, of a code from -8 to 7, has its highest bit the other way round.
  const auto word_of = [](uint64_t eight) { return nibbles_of(eight ^ 0x0808080808080808ull); };
  size_t k = 0;
  for (; k + 8 <= count; k += 8) {
    uint64_t eight;
    std::memcpy(&eight, codes + k, 8);
    *words++ = word_of(eight);
  }
  if (k < count) {
    uint64_t rest = 0;
    std::memcpy(&rest, codes + k, count - k);
    *words = word_of(rest);
  }
}

static inline void pack_codes_panel(const PackCodesCall& call, const ExactNumbers& numbers,
                                    uint32_t* packed, size_t panel) {
  const QuantizedShape& shape = numbers.shape;
  const size_t width = shape.in_features, groups = shape.groups();
  const size_t scale_words = shape.scale_words(), offset_words = shape.offset_words();
  uint32_t* words = packed + panel * shape.panel_words();
  words = std::copy_n(numbers.scales.data() + panel * scale_words, scale_words, words);
  words = std::copy_n(numbers.offsets.data() + panel * offset_words, offset_words, words);
  static constexpr int8_t kZeros[kMaxGroup] = {};
  for (size_t g = 0; g < groups; ++g) {
    const size_t begin = g * shape.group;
    const size_t count = begin + shape.group < width ? shape.group : width - begin;
    const size_t num_words = ceil_div(count, shape.per_unit()) * shape.unit_words();
    uint32_t lanes[kLanes][kMaxGroup / 4];
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const size_t row = panel * kLanes + lane;
      const bool is_row = row < shape.out_features;
      code_words(is_row ? call.codes + row * width + begin : kZeros, count, shape.bits,
                 lanes[lane]);
    }
    for (size_t w = 0; w < num_words; ++w, words += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) words[lane] = lanes[lane][w];
    }
  }
}

static void pack_codes(const PackCodesCall& call, const ExactNumbers& numbers, uint32_t* packed,
                       Workers& workers) {
  for_each_task(workers.team(true), call.shape.panels(),
                [&](size_t panel, int) { pack_codes_panel(call, numbers, packed, panel); });
}

}  // namespace lora_serve::LORA_SERVE_PATH
