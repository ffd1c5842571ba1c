// 2^x and what is made of it.
//
// x = n + r with n integral and |r| <= 1/2; 2^r is a polynomial of degree 6, fitted for the least
// relative error with its constant term held at 1, so that 2^0 is exactly 1. Error below 1.2 units
// in the last place; 0 below 2^-150, infinity from 2^128 on, NaN to NaN.

#pragma once

#include "dtype.h"

namespace lora_serve::LORA_SERVE_PATH {

constexpr float kLog2E = 1.44269504088896340736f;

// (2^r - 1) / r
SIMD_INLINE F32x16 exp2_slope(F32x16 r) {
  F32x16 p = broadcast(1.53533619e-4f);
  p = fma(p, r, broadcast(1.33988745e-3f));
  p = fma(p, r, broadcast(9.61843736e-3f));
  p = fma(p, r, broadcast(5.55033247e-2f));
  p = fma(p, r, broadcast(2.40226479e-1f));
  return fma(p, r, broadcast(6.93147203e-1f));
}

// For x below 129.
SIMD_INLINE F32x16 exp2_below_overflow(F32x16 x) {
  x = at_least(x, broadcast(-151.0f));
  const F32x16 n = round_to_integer(x);
  const F32x16 r = sub(x, n);
  return scale_by_power(fma(exp2_slope(r), r, broadcast(1.0f)), n);
}

SIMD_INLINE F32x16 exp2(F32x16 x) { return exp2_below_overflow(at_most(x, broadcast(129.0f))); }

// x / (1 + exp(-x))
SIMD_INLINE F32x16 silu(F32x16 x) {
  const F32x16 e = exp2(mul(x, broadcast(-kLog2E)));
  return div(x, add(broadcast(1.0f), e));
}

// x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u)), where u = sqrt(2 / pi) (x + 0.044715 x^3)
SIMD_INLINE F32x16 gelu_tanh(F32x16 x) {
  constexpr float kLinear = -2 * 0.79788456080286535588f * kLog2E;
  constexpr float kCubic = kLinear * 0.044715f;
  const F32x16 exponent = mul(x, fma(mul(x, x), broadcast(kCubic), broadcast(kLinear)));
  return div(x, add(broadcast(1.0f), exp2(exponent)));
}

// m / (m + 2), where m = exp(2 x) - 1 = 2^n (2^r - 1) + 2^n - 1: near 0, where n is 0, nothing
// cancels. Error below 4 units in the last place; exactly 1 or -1 far from 0, NaN to NaN.
SIMD_INLINE F32x16 tanh(F32x16 x) {
  constexpr float kFar = 30;
  const F32x16 doubled = mul(x, broadcast(2 * kLog2E));
  const F32x16 t = at_most(at_least(doubled, broadcast(-kFar)), broadcast(kFar));
  const F32x16 n = round_to_integer(t);
  const F32x16 r = sub(t, n);
  const F32x16 power = scale_by_power(broadcast(1.0f), n);
  const F32x16 m = fma(mul(exp2_slope(r), r), power, sub(power, broadcast(1.0f)));
  return div(m, add(m, broadcast(2.0f)));
}

}  // namespace lora_serve::LORA_SERVE_PATH
