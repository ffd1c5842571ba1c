// Scales and offsets of groups, as they are stored in panels (quantized_weight.h), as floats.
//
//   kBytes      b             b a whole number in [-128, 127]
//   kUnits      u b           u of a block, float16: [block][lane], then all b: [group][lane]
//   the others  the number itself
//
//   scale = stored
//   offset = stored * scale                 kBytes: zero points
//            shift * scale + stored         kUnits, kFloat16, rounded once; 16 shifts come first
//            stored                         kFloat
//
// Each product of a float16 and a byte is exact, so one float comes of the numbers on every path.
// exact_numbers.h chooses how numbers are stored.

#pragma once

#include "integers.h"
#include "quantized_weight.h"

namespace lora_serve::LORA_SERVE_PATH {

// take(g, 16 numbers) for groups [begin, end) of numbers of kFloat and the like.
template <class T, class Take>
SIMD_INLINE void each_alone(const uint32_t* at, size_t begin, size_t end, const Take& take) {
  const T* numbers = reinterpret_cast<const T*>(at);
  for (size_t g = begin; g < end; ++g) take(g, load(numbers + g * kLanes));
}

// Likewise of kUnits; the groups of a block share a look at its units.
template <class Take>
SIMD_INLINE void each_of_units(const QuantizedShape& shape, NumberForm form, const uint32_t* at,
                               size_t begin, size_t end, const Take& take) {
  const Float16* units = reinterpret_cast<const Float16*>(at);
  const int8_t* counts = reinterpret_cast<const int8_t*>(at + shape.blocks(form) * (kLanes / 2));
  const int per_block_log2 = __builtin_ctzll(form.block / shape.group);
  for (size_t g = begin; g < end;) {
    const size_t block = g >> per_block_log2, behind = (block + 1) << per_block_log2;
    const F32x16 unit = load(units + block * kLanes);
    for (const size_t stop = behind < end ? behind : end; g < stop; ++g) {
      take(g, mul(unit, load(counts + g * kLanes)));
    }
  }
}

template <Stored kStored, class Take>
SIMD_INLINE void each_number(const QuantizedShape& shape, NumberForm form, const uint32_t* at,
                             size_t begin, size_t end, const Take& take) {
  if constexpr (kStored == Stored::kUnits) {
    each_of_units(shape, form, at, begin, end, take);
  } else if constexpr (kStored == Stored::kBytes) {
    each_alone<int8_t>(at, begin, end, take);
  } else if constexpr (kStored == Stored::kBfloat16) {
    each_alone<Bfloat16>(at, begin, end, take);
  } else if constexpr (kStored == Stored::kFloat16) {
    each_alone<Float16>(at, begin, end, take);
  } else {
    each_alone<float>(at, begin, end, take);
  }
}

template <Stored kStored>
struct StoredAs {
  static constexpr Stored value = kStored;
};

// run(StoredAs<form.stored>()); not of kNothing.
template <class Run>
SIMD_INLINE void with_stored(NumberForm form, const Run& run) {
  switch (form.stored) {
    case Stored::kNothing:
      return;
    case Stored::kBytes:
      return run(StoredAs<Stored::kBytes>());
    case Stored::kUnits:
      return run(StoredAs<Stored::kUnits>());
    case Stored::kBfloat16:
      return run(StoredAs<Stored::kBfloat16>());
    case Stored::kFloat16:
      return run(StoredAs<Stored::kFloat16>());
    case Stored::kFloat:
      return run(StoredAs<Stored::kFloat>());
  }
}

// One panel's scales of groups [begin, end), each `stride` floats behind the one before.
static inline void widen_scales(const QuantizedShape& shape, const uint32_t* at, size_t begin,
                                size_t end, float* to, size_t stride) {
  with_stored(shape.scales, [&](auto kind) {
    each_number<decltype(kind)::value>(
        shape, shape.scales, at, begin, end,
        [&](size_t g, F32x16 number) { store(to + (g - begin) * stride, number); });
  });
}

// Likewise of offsets. scales: what widen_scales gave.
static inline void widen_offsets(const QuantizedShape& shape, const uint32_t* at, size_t begin,
                                 size_t end, const float* scales, float* to, size_t stride) {
  with_stored(shape.offsets, [&](auto kind) {
    constexpr Stored kStored = decltype(kind)::value;
    constexpr bool kIsShifted = kStored == Stored::kUnits || kStored == Stored::kFloat16;
    const F32x16 shifts = kIsShifted ? load(reinterpret_cast<const float*>(at)) : zero();
    each_number<kStored>(shape, shape.offsets, at + (kIsShifted ? kLanes : 0), begin, end,
                         [&](size_t g, F32x16 number) {
                           const size_t place = (g - begin) * stride;
                           const F32x16 scale = load(scales + place);
                           if (kIsShifted) number = fma(shifts, scale, number);
                           if (kStored == Stored::kBytes) number = mul(number, scale);
                           store(to + place, number);
                         });
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
