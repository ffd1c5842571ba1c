// 2^x and what is made of it.
//
// x = n + r with n integral and |r| <= 1/2; 2^r is a polynomial of degree 6, fitted for the least
// relative error with its constant term held at 1, so that 2^0 is exactly 1. Error below 1.2 units
// in the last place; 0 below 2^-150, infinity from 2^128 on, NaN to NaN.

#pragma once

#include "dtype.h"

namespace lora_serve::LORA_SERVE_PATH {

constexpr float kLog2E = 1.44269504088896340736f;

// For x below 129.
SIMD_INLINE F32x16 exp2_below_overflow(F32x16 x) {
  x = at_least(x, broadcast(-151.0f));
  const F32x16 n = round_to_integer(x);
  const F32x16 r = sub(x, n);
  F32x16 p = broadcast(1.53533619e-4f);
  p = fma(p, r, broadcast(1.33988745e-3f));
  p = fma(p, r, broadcast(9.61843736e-3f));
  p = fma(p, r, broadcast(5.55033247e-2f));
  p = fma(p, r, broadcast(2.40226479e-1f));
  p = fma(p, r, broadcast(6.93147203e-1f));
  p = fma(p, r, broadcast(1.0f));
  return scale_by_power(p, n);
}

SIMD_INLINE F32x16 exp2(F32x16 x) { return exp2_below_overflow(at_most(x, broadcast(129.0f))); }

// x / (1 + exp(-x))
SIMD_INLINE F32x16 silu(F32x16 x) {
  const F32x16 e = exp2(mul(x, broadcast(-kLog2E)));
  return div(x, add(broadcast(1.0f), e));
}

}  // namespace lora_serve::LORA_SERVE_PATH
