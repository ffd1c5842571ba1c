"""Triton's interpreter with sums of one order, as a card's tensor cores have them.

The interpreter multiplies by the machine's BLAS, which may sum a row in another order when the
tile has another shape, or the CPU another name. Kernels that promise rows of equal bits would then
look the same as kernels that break the promise.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt


def ordered_product(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(M, K) @ (K, N) or batches of such, every element's sum over ascending k."""
    product = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        product += a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return product


def install() -> None:
    """Patch the interpreter of this process for good."""
    from triton.runtime import interpreter

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        kind = d.data.dtype
        product = ordered_product(a.data.astype(kind), b.data.astype(kind))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
