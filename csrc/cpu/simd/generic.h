// Sixteen float lanes in GCC's and Clang's own vector type, which becomes whatever the target has:
// SSE2 on a bare x86-64, NEON on arm64. Vocabulary: simd/avx512.h.
//
// fma is one rounding where the target has it in hardware, a product and a sum elsewhere: calling
// the C library's fmaf per lane would be a hundred times slower.

#pragma once

#include <cstring>

#include "../dtype.h"

#define SIMD_EACH_LANE for (int i = 0; i < kLanes; ++i)

namespace lora_serve::LORA_SERVE_PATH {

typedef float FloatLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordLanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

struct F32x16 {
  FloatLanes v;
};

struct U32x16 {
  WordLanes v;
};

SIMD_INLINE F32x16 zero() { return {FloatLanes{}}; }
SIMD_INLINE F32x16 broadcast(float x) { return {FloatLanes{} + x}; }
SIMD_INLINE F32x16 add(F32x16 a, F32x16 b) { return {a.v + b.v}; }
SIMD_INLINE F32x16 sub(F32x16 a, F32x16 b) { return {a.v - b.v}; }
SIMD_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {a.v * b.v}; }
SIMD_INLINE F32x16 div(F32x16 a, F32x16 b) { return {a.v / b.v}; }
SIMD_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#ifdef __FP_FAST_FMAF
  SIMD_EACH_LANE c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
#else
  return {a.v * b.v + c.v};
#endif
}
SIMD_INLINE F32x16 at_least(F32x16 x, F32x16 bound) { return {x.v < bound.v ? bound.v : x.v}; }
SIMD_INLINE F32x16 at_most(F32x16 x, F32x16 bound) { return {x.v > bound.v ? bound.v : x.v}; }
// By adding and taking away 1.5 * 2^23, where floats are integers: |x| < 2^22, all that exp2 asks.
SIMD_INLINE F32x16 round_to_integer(F32x16 x) {
  constexpr float kShift = 12582912.0f;
  return {(x.v + kShift) - kShift};
}

SIMD_INLINE float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
SIMD_INLINE uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

SIMD_INLINE FloatLanes power_of_two(IntLanes n) {
  return reinterpret_cast<FloatLanes>((n + 127) << 23);
}

// In two factors, so that n may leave the exponent's range. A NaN in n is a NaN in x already.
SIMD_INLINE F32x16 scale_by_power(F32x16 x, F32x16 power) {
  const FloatLanes number = power.v == power.v ? power.v : FloatLanes{};
  const IntLanes n = __builtin_convertvector(number, IntLanes);
  const IntLanes half = n >> 1;
  return {x.v * power_of_two(half) * power_of_two(n - half)};
}

SIMD_INLINE float reduce_add(F32x16 x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
  }
  return x.v[0];
}

SIMD_INLINE float reduce_max(F32x16 x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      x.v[i] = x.v[i] > x.v[i + width] ? x.v[i] : x.v[i + width];
    }
  }
  return x.v[0];
}

SIMD_INLINE F32x16 keep_lanes(F32x16 x, int begin, int end, float fill) {
  const IntLanes lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {((lane >= begin) & (lane < end)) != 0 ? x.v : broadcast(fill).v};
}

SIMD_INLINE U32x16 load_words(const uint32_t* p) {
  U32x16 w;
  std::memcpy(&w.v, p, sizeof w.v);
  return w;
}
SIMD_INLINE U32x16 mask_words(U32x16 w, uint32_t mask) { return {w.v & mask}; }

SIMD_INLINE float widen(Bfloat16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }

SIMD_INLINE float widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return float_of_bits(sign | magnitude | 0x7f800000u);
  // 2^112 moves the exponent's bias from 15 to 127; denormals come out right by themselves.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude) * 0x1p112f));
}

SIMD_INLINE Bfloat16 narrow_to(float x, Bfloat16) {
  const uint32_t bits = bits_of_float(x);
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

SIMD_INLINE Float16 narrow_to(float x, Float16) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or more
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // denormal: 0.5 has the half's last place as its own
    half = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

template <class T>
struct Widen;

template <>
struct Widen<float> {
  SIMD_INLINE F32x16 element(U32x16 w, int) { return {reinterpret_cast<FloatLanes>(w.v)}; }
};

template <>
struct Widen<Bfloat16> {
  SIMD_INLINE F32x16 element(U32x16 w, int e) {
    return {reinterpret_cast<FloatLanes>(e == 0 ? w.v << 16 : w.v & 0xffff0000u)};
  }
};

template <>
struct Widen<Float16> {
  SIMD_INLINE F32x16 element(U32x16 w, int e) {
    F32x16 y;
    SIMD_EACH_LANE y.v[i] = widen(Float16{static_cast<uint16_t>(e == 0 ? w.v[i] : w.v[i] >> 16)});
    return y;
  }
};

SIMD_INLINE F32x16 load(const float* p) {
  F32x16 y;
  std::memcpy(&y.v, p, sizeof y.v);
  return y;
}
SIMD_INLINE void store(float* p, F32x16 x) { std::memcpy(p, &x.v, sizeof x.v); }

template <class T>
SIMD_INLINE F32x16 load(const T* p) {
  F32x16 y;
  SIMD_EACH_LANE y.v[i] = widen(p[i]);
  return y;
}
template <class T>
SIMD_INLINE void store(T* p, F32x16 x) {
  SIMD_EACH_LANE p[i] = narrow_to(x.v[i], T{});
}

template <class T>
SIMD_INLINE F32x16 load_first(const T* p, int n) {
  T row[kLanes] = {};
  std::memcpy(row, p, static_cast<size_t>(n) * sizeof(T));
  return load(static_cast<const T*>(row));
}

template <class T>
SIMD_INLINE void store_first(T* p, F32x16 x, int n) {
  T row[kLanes];
  store(row, x);
  std::memcpy(p, row, static_cast<size_t>(n) * sizeof(T));
}

}  // namespace lora_serve::LORA_SERVE_PATH
