"""Rounding, products and tanh that mean the same whether kernels are compiled or interpreted.

Triton's interpreter holds bfloat16 as bits: it cuts them off instead of rounding, and multiplies
them as whole numbers. Only this file knows whether kernels are interpreted.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Float32 `x` to the nearest of `dtype`, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(x == x, nearest, 0x7FC0)
        result = nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def hyperbolic_tangent(x):
    """Tanh of float32 `x` to 5e-7 of its value; near 0 by a polynomial, so that nothing cancels.

    Coefficients: minimax of (tanh x - x) / x^3 in x^2 for |x| below 0.625 (Cephes).
    """
    size = tl.abs(x)
    square = x * x
    near = tl.fma(square, -5.70498872745e-3, 2.06390887954e-2)
    near = tl.fma(near, square, -5.37397155531e-2)
    near = tl.fma(near, square, 1.33314422036e-1)
    near = tl.fma(near, square, -3.33332819422e-1)
    near = tl.fma(near * square, x, x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def multiply(a, b, total):
    """The sum total + a @ b, in float32. a and b are of one dtype; float32 is not narrowed."""
    if INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        result = tl.dot(a, b, total, input_precision="ieee")
    return result


@triton.jit
def multiply_wide(a, b, total):
    """`multiply` for a float32 `a` and a narrow `b`: three products on tensor cores, 22 bits of a.

    Two parts of 11 bits hold a; b's 8 or 11 bits need only one. Where b is float32, plain float32.
    """
    if b.dtype == tl.float32:
        result = tl.dot(a, b, total, input_precision="ieee")
    else:
        result = tl.dot(a, b.to(tl.float32), total, input_precision="tf32x3")
    return result
