#include "quantized_weight.h"

#include <algorithm>
#include <cstring>

#define LORA_SERVE_PATH baseline
#include "parallel.h"

namespace lora_serve {
namespace {

// The word of codes[0 ... count - 1]; count is at most per_word.
uint32_t word_of(const int8_t* codes, size_t count, int bits) {
  constexpr size_t kNibbleOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  uint32_t word = 0;
  if (bits == 8) {
    for (size_t i = 0; i < count; ++i) {
      word |= static_cast<uint32_t>(static_cast<uint8_t>(codes[i])) << (8 * i);
    }
    return word;
  }
  for (size_t i = 0; i < 8; ++i) {
    const size_t k = kNibbleOrder[i];
    word |= static_cast<uint32_t>((k < count ? codes[k] : 0) + 8) << (4 * i);
  }
  return word;
}

}  // namespace

void pack_quantized(const int8_t* codes, const Bfloat16* scales, const QuantizedShape& shape,
                    uint32_t* packed, Team team) {
  const size_t groups = shape.groups(), per_word = shape.per_word(), in = shape.in_features;
  baseline::for_each_task(team, shape.panels(), [&](size_t panel, int) {
    uint32_t* to = packed + panel * shape.panel_words();
    std::memset(to, 0, shape.scale_words() * sizeof(uint32_t));
    Bfloat16* scales_to = reinterpret_cast<Bfloat16*>(to);
    uint32_t* codes_to = to + shape.scale_words();
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const size_t row = panel * kLanes + lane;
      const bool is_row = row < shape.out_features;
      for (size_t g = 0; is_row && g < groups; ++g) {
        scales_to[g * kLanes + lane] = scales[row * groups + g];
      }
      for (size_t w = 0; w < shape.words(); ++w) {
        const size_t k = w * per_word;
        const size_t count = is_row ? std::min(per_word, in - k) : 0;
        const int8_t* from = is_row ? codes + row * in + k : nullptr;
        codes_to[w * kLanes + lane] = word_of(from, count, shape.bits);
      }
    }
  });
}

}  // namespace lora_serve
