// y[t][n] = bias[n] + sum over groups g of (sum over k in g of x_code[t][k] * w_code[n][k])
//                                          * (w_scale[n][g] * x_scale[t][g])
//
// T rows of activations in bytes (quantized_rows.h) times quantised weights. A group's sum of whole
// numbers is exact in any order; groups are multiplied and added, each rounded to float, over
// ascending g from 0. So every path gives the same bits, and the reference in torch does too. Codes
// have 8 or 4 bits, and scales are bfloat16.

#pragma once

#include "quantized_linear.h"
#include "quantized_rows.h"

namespace lora_serve::LORA_SERVE_PATH {

struct IntegerProduct {
  QuantizedRows rows;
  const QuantizedWeight& weight;
};

// The exact sums of one group.
template <class Codes, int kRows, int kVectors>
SIMD_INLINE void multiply_bytes(const IntegerProduct& product, size_t row, size_t g, Range words,
                                const CodeView<kVectors>& view, I32x16 (&acc)[kRows][kVectors]) {
  const QuantizedRows& x = product.rows;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const I32x16 start = broadcast_integer(x.starts[(row + r) * x.groups + g]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) acc[r][v] = start;
  }
  const int8_t* left = x.codes + row * x.stride;
  for (size_t w = words.begin; w < words.end; ++w) {
    view.fetch_ahead(w);
    U32x16 packed[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) packed[v] = load_words(view.codes[v] + w * kLanes);
#pragma GCC unroll 2
    for (int i = 0; i < Codes::kPerUnit / 4; ++i) {
      U32x16 bytes[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) bytes[v] = Codes::bytes(packed[v], i);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const U32x16 a = broadcast_word(left + r * x.stride + w * Codes::kPerUnit + 4 * i);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) acc[r][v] = Codes::dot(bytes[v], a, acc[r][v]);
      }
    }
  }
}

// total + sum * (scale of the weight * scale of the row)
SIMD_INLINE F32x16 add_scaled(F32x16 total, I32x16 sum, F32x16 weight_scale, float row_scale) {
  return add(total, mul(to_float(sum), mul(weight_scale, broadcast(row_scale))));
}

// The sums of one or two rows stay in registers from group to group.
template <class Codes, int kRows, int kVectors>
static __attribute__((noinline)) void integer_rows(const IntegerProduct& product, size_t row,
                                                   const CodeView<kVectors>& view, float* sums) {
  const QuantizedShape& shape = product.weight.shape;
  F32x16 total[kRows][kVectors];
  clear(total);
  for (size_t g = 0; g < shape.groups(); ++g) {
    I32x16 acc[kRows][kVectors];
    multiply_bytes<Codes>(product, row, g, units_of_group<Codes>(shape, g), view, acc);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const F32x16 scale = view.bfloat16_scale(v, g);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const float row_scale = product.rows.scales[(row + r) * product.rows.groups + g];
        total[r][v] = add_scaled(total[r][v], acc[r][v], scale, row_scale);
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, total[r][v]);
  }
}

// Sums of more rows are in memory, so that a group's own have the registers.
template <class Codes, int kRows, int kVectors>
static __attribute__((noinline)) void add_integer_group(const IntegerProduct& product, size_t row,
                                                        size_t g, const CodeView<kVectors>& view,
                                                        float* sums) {
  I32x16 acc[kRows][kVectors];
  multiply_bytes<Codes>(product, row, g, units_of_group<Codes>(product.weight.shape, g), view, acc);
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 scale = view.bfloat16_scale(v, g);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      const float row_scale = product.rows.scales[(row + r) * product.rows.groups + g];
      store(sum, add_scaled(load(sum), acc[r][v], scale, row_scale));
    }
  }
}

template <class Codes, int kRows, int kVectors>
static void integer_block(const IntegerProduct& product, size_t row,
                          const CodeView<kVectors>& view, float* sums) {
  if constexpr (kRows <= static_cast<int>(kFewRows)) {
    integer_rows<Codes, kRows>(product, row, view, sums);
  } else {
    std::memset(sums, 0, kRows * kVectors * kLanes * sizeof(float));
    for (size_t g = 0; g < product.weight.shape.groups(); ++g) {
      add_integer_group<Codes, kRows>(product, row, g, view, sums);
    }
  }
}

// All rows times kVectors panels, at most kMost rows at once.
template <class Codes, int kVectors, int kMost, class Finish>
static void integer_panels(const IntegerProduct& product, Range rows, size_t panel,
                           const Finish& finish) {
  const CodeView<kVectors> view(product.weight, panel);
  for_each_block(rows, kMost, [&](Range block) {
    alignas(64) float sums[kMost * kVectors * kLanes];
    const size_t count = block.end - block.begin;
    with_count<kMost>(count, [&](auto num_rows) {
      integer_block<Codes, decltype(num_rows)::value>(product, block.begin, view, sums);
    });
    for (size_t r = 0; r < count; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        finish(block.begin + r, panel + v,
               static_cast<const float*>(sums + (r * kVectors + v) * kLanes));
      }
    }
  });
}

template <class Codes, class Finish>
static void multiply_integers(const IntegerProduct& product, Range rows, Range panels,
                              const Finish& finish) {
  size_t panel = panels.begin;
  if (rows.end - rows.begin <= kFewRows) {
    for (; panel + kPanelsOfFewRows <= panels.end; panel += kPanelsOfFewRows) {
      integer_panels<Codes, kPanelsOfFewRows, kFewRows>(product, rows, panel, finish);
    }
  }
  for (; panel + kMaxVectors <= panels.end; panel += kMaxVectors) {
    integer_panels<Codes, kMaxVectors, kMaxRows>(product, rows, panel, finish);
  }
  for (; panel < panels.end; ++panel) {
    integer_panels<Codes, 1, kMaxRows>(product, rows, panel, finish);
  }
}

template <class Codes, class T>
static void integer_linear_by(const QuantizedLinearCall& call, Workers& workers) {
  const QuantizedShape& shape = call.weight.shape;
  const LinearCall& linear = call.linear;
  const Team team = quantized_team(shape, linear.rows, workers);
  void* memory = workers.scratch.take(quantized_rows_bytes(shape, linear.rows));
  const IntegerProduct product{
      quantize_rows<Codes>(static_cast<const T*>(linear.x), linear.rows, shape, memory, team),
      call.weight};
  const size_t rows_at_once = round_up(kChunkBytes / product.rows.stride + 1, kMaxRows);
  share_quantized(team, linear.rows, rows_at_once, 1, shape.panels(),
                  [&](Range rows, Range panels, int) {
                    multiply_integers<Codes>(product, rows, panels,
                                             [&](size_t row, size_t panel, const float* sums) {
                                               finish_linear<T>(linear, row, panel, sums);
                                             });
                  });
}

template <class T>
static void quantized_linear_of(const QuantizedLinearCall& call, Workers& workers) {
  const int bits = call.weight.shape.bits;
  if (call.quantize_activations) {
    return bits == 8 ? integer_linear_by<EightBits, T>(call, workers)
                     : integer_linear_by<FourBits, T>(call, workers);
  }
  return bits == 8   ? quantized_linear_by<EightBits, T>(call, workers)
         : bits == 6 ? quantized_linear_by<SixBits, T>(call, workers)
         : bits == 5 ? quantized_linear_by<FiveBits, T>(call, workers)
                     : quantized_linear_by<FourBits, T>(call, workers);
}

}  // namespace lora_serve::LORA_SERVE_PATH
