// Activations as bytes, each row by itself.
//
//   scale[t][g] = max over k in g of |x[t][k]| / 127
//   code[t][k]  = x[t][k] * (127 / max), rounded
//   start[t][g] = -offset * sum over k in g of code[t][k]
//
// T rows; groups g are those of the weight. Ties go to even. A group whose maximum is below 2^-100
// counts as zero; one that holds an infinity or a NaN has the scale NaN. Every number comes from
// one operation of IEEE 754 after another, so every path finds the same bits.

#pragma once

#include "codes.h"
#include "quantized_weight.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

constexpr float kLeastMagnitude = 0x1p-100f;

// codes (T, stride) bytes in the order of Codes; scales and starts (T, groups). start makes good
// for the weights' bytes being too large by offset.
struct QuantizedRows {
  int8_t* codes;
  float* scales;
  int32_t* starts;
  size_t stride, groups;
};

static inline size_t quantized_rows_bytes(const QuantizedShape& shape, size_t rows) {
  const size_t stride = round_up(shape.units() * shape.per_unit(), kLanes);
  return rows * (stride + shape.groups() * (sizeof(float) + sizeof(int32_t)));
}

// memory: quantized_rows_bytes, 64-byte aligned.
static inline QuantizedRows quantized_rows_in(void* memory, const QuantizedShape& shape,
                                              size_t rows) {
  const size_t stride = round_up(shape.units() * shape.per_unit(), kLanes);
  int8_t* codes = static_cast<int8_t*>(memory);
  float* scales = reinterpret_cast<float*>(codes + rows * stride);
  int32_t* starts = reinterpret_cast<int32_t*>(scales + rows * shape.groups());
  return {codes, scales, starts, stride, shape.groups()};
}

// One group of one row; codes has room for whole vectors.
template <class Codes, class T>
static void quantize_group(const T* x, size_t width, int8_t* codes, float& scale, int32_t& start) {
  F32x16 largest = zero(), poison = zero();
  for_each_vector(width, [&](size_t k, auto n) {
    const F32x16 v = load_lanes(x + k, n);
    largest = at_least(at_least(v, sub(zero(), v)), largest);
    poison = fma(v, zero(), poison);  // NaN from here on if v is not finite
  });
  const float maximum = reduce_max(largest);
  const bool is_finite = reduce_add(poison) == 0.0f;
  scale = is_finite ? maximum / 127.0f : __builtin_nanf("");
  start = 0;
  if (!is_finite || maximum < kLeastMagnitude) {
    std::memset(codes, 0, round_up(width, kLanes));
    return;
  }
  const F32x16 inverse = broadcast(127.0f / maximum);
  F32x16 sum = zero();  // of whole numbers: exact
  for_each_vector(width, [&](size_t k, auto n) {
    const F32x16 code = round_to_integer(mul(load_lanes(x + k, n), inverse));
    sum = add(sum, code);
    store_bytes(codes + k, Codes::in_byte_order(code));
  });
  start = -Codes::kOffset * static_cast<int32_t>(reduce_add(sum));
}

template <class Codes, class T>
static QuantizedRows quantize_rows(const T* x, size_t rows, const QuantizedShape& shape,
                                   void* memory, Team team) {
  const QuantizedRows to = quantized_rows_in(memory, shape, rows);
  const size_t width = shape.in_features, groups = shape.groups();
  const size_t num_tasks = team.num_threads == 1 ? 1 : rows;
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range part = part_of(rows, num_tasks, task);
    for (size_t r = part.begin; r < part.end; ++r) {
      for (size_t g = 0; g < groups; ++g) {
        const size_t begin = g * shape.group;
        const size_t end = begin + shape.group < width ? begin + shape.group : width;
        quantize_group<Codes>(x + r * width + begin, end - begin, to.codes + r * to.stride + begin,
                              to.scales[r * groups + g], to.starts[r * groups + g]);
      }
    }
  });
  return to;
}

}  // namespace lora_serve::LORA_SERVE_PATH
