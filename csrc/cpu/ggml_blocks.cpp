#include "ggml_blocks.h"

#include <cstring>
#include <stdexcept>

#define LORA_SERVE_PATH baseline
#include "parallel.h"

namespace lora_serve {
namespace {

constexpr size_t kBlocksAtOnce = 256;  // of one task

float float_of_half(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits = sign | ((rest << 13) + (uint32_t{112} << 23));
  if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest << 13);  // an infinity or a NaN
  float value;
  std::memcpy(&value, &bits, sizeof value);
  if (rest >= 0x0400) return value;
  const float small = static_cast<float>(rest) * 0x1p-24f;  // a denormal, or zero
  return sign != 0 ? -small : small;
}

// The low halves of n bytes, then the high ones.
template <int n>
void nibbles(const uint8_t* packed, int8_t* codes) {
  for (int i = 0; i < n; ++i) {
    codes[i] = static_cast<int8_t>(packed[i] & 15);
    codes[n + i] = static_cast<int8_t>(packed[i] >> 4);
  }
}

// Adds 16 to each of 32 codes whose bit is set.
void add_fifth_bits(const uint8_t* at, int8_t* codes) {
  for (int byte = 0; byte < 4; ++byte) {
    // Byte i keeps bit i alone, which a carry or itself brings to the byte's highest bit.
    const uint64_t alone = at[byte] * 0x0101010101010101ull & 0x8040201008040201ull;
    const uint64_t set = ((alone + 0x007f7f7f7f7f7f7full) | alone) & 0x8080808080808080ull;
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * byte, sizeof eight);
    eight |= set >> 3;
    std::memcpy(codes + 8 * byte, &eight, sizeof eight);
  }
}

template <int n>
void subtract(int8_t* codes, int what) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(codes[i] - what);
}

// Each type has the bytes of a block, its values, those of a group, whether it has offsets, and the
// bits of its codes; and it takes a block apart into codes that begin at 0 where it has offsets.
template <size_t bytes, bool offsets, int bits>
struct Of32 {
  static constexpr size_t kBytes = bytes, kValues = 32, kGroup = 32;
  static constexpr bool kHasOffsets = offsets;
  static constexpr int kBits = bits;
};

struct Q4_0 : Of32<18, false, 4> {
  static void apart(const uint8_t* block, int8_t* codes, float* scales, float*) {
    nibbles<16>(block + 2, codes);
    subtract<32>(codes, 8);
    scales[0] = float_of_half(block);
  }
};

struct Q4_1 : Of32<20, true, 4> {
  static void apart(const uint8_t* block, int8_t* codes, float* scales, float* offsets) {
    nibbles<16>(block + 4, codes);
    scales[0] = float_of_half(block);
    offsets[0] = float_of_half(block + 2);
  }
};

struct Q5_0 : Of32<22, false, 8> {
  static void apart(const uint8_t* block, int8_t* codes, float* scales, float*) {
    nibbles<16>(block + 6, codes);
    add_fifth_bits(block + 2, codes);
    subtract<32>(codes, 16);
    scales[0] = float_of_half(block);
  }
};

struct Q5_1 : Of32<24, true, 8> {
  static void apart(const uint8_t* block, int8_t* codes, float* scales, float* offsets) {
    nibbles<16>(block + 8, codes);
    add_fifth_bits(block + 4, codes);
    scales[0] = float_of_half(block);
    offsets[0] = float_of_half(block + 2);
  }
};

struct Q8_0 : Of32<34, false, 8> {
  static void apart(const uint8_t* block, int8_t* codes, float* scales, float*) {
    std::memcpy(codes, block + 2, 32);
    scales[0] = float_of_half(block);
  }
};

// Bytes 4 to 15: six bits of each of 8 groups' scales and offsets, see the Python module.
void six_bit_scales(const uint8_t* block, float* scales, float* offsets) {
  const float d = float_of_half(block), m = float_of_half(block + 2);
  const uint8_t *first = block + 4, *second = block + 8, *halves = block + 12;
  for (int i = 0; i < 4; ++i) {
    scales[i] = d * static_cast<float>(first[i] & 63);
    offsets[i] = m * -static_cast<float>(second[i] & 63);
    scales[4 + i] = d * static_cast<float>((halves[i] & 15) | first[i] >> 6 << 4);
    offsets[4 + i] = m * -static_cast<float>(halves[i] >> 4 | second[i] >> 6 << 4);
  }
}

struct Q4_K {
  static constexpr size_t kBytes = 144, kValues = 256, kGroup = 32;
  static constexpr bool kHasOffsets = true;
  static constexpr int kBits = 4;
  static void apart(const uint8_t* block, int8_t* codes, float* scales, float* offsets) {
    six_bit_scales(block, scales, offsets);
    for (int i = 0; i < 4; ++i) nibbles<32>(block + 16 + 32 * i, codes + 64 * i);
  }
};

struct Q5_K {
  static constexpr size_t kBytes = 176, kValues = 256, kGroup = 32;
  static constexpr bool kHasOffsets = true;
  static constexpr int kBits = 8;
  static void apart(const uint8_t* block, int8_t* codes, float* scales, float* offsets) {
    six_bit_scales(block, scales, offsets);
    for (int i = 0; i < 4; ++i) nibbles<32>(block + 48 + 32 * i, codes + 64 * i);
    for (int group = 0; group < 8; ++group) {
      for (int i = 0; i < 32; ++i) {
        codes[32 * group + i] =
            static_cast<int8_t>(codes[32 * group + i] | (block[16 + i] >> group & 1) << 4);
      }
    }
  }
};

struct Q6_K {
  static constexpr size_t kBytes = 210, kValues = 256, kGroup = 16;
  static constexpr bool kHasOffsets = false;
  static constexpr int kBits = 8;
  static void apart(const uint8_t* block, int8_t* codes, float* scales, float*) {
    const float d = float_of_half(block + 208);
    for (int i = 0; i < 16; ++i) {
      scales[i] = d * static_cast<float>(static_cast<int8_t>(block[192 + i]));
    }
    for (int half = 0; half < 2; ++half) {
      int8_t* to = codes + 128 * half;
      nibbles<64>(block + 64 * half, to);
      const uint8_t* high = block + 128 + 32 * half;
      for (int part = 0; part < 4; ++part) {
        for (int i = 0; i < 32; ++i) {
          const int code = to[32 * part + i] | (high[i] >> 2 * part & 3) << 4;
          to[32 * part + i] = static_cast<int8_t>(code - 32);
        }
      }
    }
  }
};

// Codes from 0 to 15 become -8 to 7.
template <class Type>
void centre(int8_t* codes, const float* scales, float* offsets) {
  if constexpr (Type::kHasOffsets && Type::kBits == 4) {
    subtract<Type::kValues>(codes, 8);
    for (size_t g = 0; g < Type::kValues / Type::kGroup; ++g) offsets[g] += 8.0f * scales[g];
  }
}

// Calls run(begin, end) for parts of all blocks.
template <class Run>
void share(size_t num_blocks, Team team, const Run& run) {
  baseline::for_each_task(team, ceil_div(num_blocks, kBlocksAtOnce), [&](size_t task, int) {
    const size_t begin = task * kBlocksAtOnce, end = begin + kBlocksAtOnce;
    run(begin, end < num_blocks ? end : num_blocks);
  });
}

template <class Type>
void unpack_all(const uint8_t* blocks, size_t num_blocks, const BlockCodes& to, Team team) {
  constexpr size_t groups = Type::kValues / Type::kGroup;
  share(num_blocks, team, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      int8_t* codes = to.codes + i * Type::kValues;
      float* scales = to.scales + i * groups;
      float* offsets = Type::kHasOffsets ? to.offsets + i * groups : nullptr;
      Type::apart(blocks + i * Type::kBytes, codes, scales, offsets);
      centre<Type>(codes, scales, offsets);
    }
  });
}

float rounded_to(float x, const float&) { return x; }

Bfloat16 rounded_to(float x, const Bfloat16&) {
  if (x != x) return {0x7fc0};
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <class Type, class To>
void dequantize_all(const uint8_t* blocks, size_t num_blocks, To* to, Team team) {
  constexpr size_t groups = Type::kValues / Type::kGroup;
  share(num_blocks, team, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      int8_t codes[Type::kValues];
      float scales[groups], offsets[groups];
      Type::apart(blocks + i * Type::kBytes, codes, scales, offsets);
      To* values = to + i * Type::kValues;
      for (size_t g = 0; g < groups; ++g) {
        for (size_t k = g * Type::kGroup; k < (g + 1) * Type::kGroup; ++k) {
          float value = scales[g] * static_cast<float>(codes[k]);
          if constexpr (Type::kHasOffsets) value += offsets[g];
          values[k] = rounded_to(value, To{});
        }
      }
    }
  });
}

// Calls run with a value of the type.
template <class Run>
void with_type(const std::string& type, const Run& run) {
  if (type == "Q4_0") return run(Q4_0{});
  if (type == "Q4_1") return run(Q4_1{});
  if (type == "Q5_0") return run(Q5_0{});
  if (type == "Q5_1") return run(Q5_1{});
  if (type == "Q8_0") return run(Q8_0{});
  if (type == "Q4_K") return run(Q4_K{});
  if (type == "Q5_K") return run(Q5_K{});
  if (type == "Q6_K") return run(Q6_K{});
  throw std::invalid_argument("no blocks of the type '" + type + "' are known");
}

}  // namespace

void unpack_blocks(const std::string& type, const uint8_t* blocks, size_t num_blocks,
                   const BlockCodes& to, Team team) {
  with_type(type, [&](auto of) { unpack_all<decltype(of)>(blocks, num_blocks, to, team); });
}

void dequantize_blocks(const std::string& type, const uint8_t* blocks, size_t num_blocks,
                       Dtype dtype, void* to, Team team) {
  with_type(type, [&](auto of) {
    using Type = decltype(of);
    switch (dtype) {
      case Dtype::kFloat32:
        return dequantize_all<Type>(blocks, num_blocks, static_cast<float*>(to), team);
      case Dtype::kBfloat16:
        return dequantize_all<Type>(blocks, num_blocks, static_cast<Bfloat16*>(to), team);
      case Dtype::kFloat16:
        break;
    }
    throw std::invalid_argument("blocks become float32 or bfloat16");
  });
}

}  // namespace lora_serve
