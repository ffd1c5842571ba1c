"""What the kernels of linear layers do, and how their weights may be packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lora_serve.ops.contract.packed import LinearInT, LinearOutT, LinearT
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight


class LinearKernels(Protocol[LinearT]):
    """Linear layers, their weights in the backend's own order."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None, /) -> LinearT:
        """Pack weight (out, in) and bias (out). May keep the weight itself."""

    def pack_rows(self, weight: Tensor, /) -> LinearT:
        """Pack weight (out, in) as it is, never quantised, for `linear`.

        Any thread may, beside the one that runs steps. Its memory is free when it is dropped.
        """

    def linear(self, x: Tensor, packed: LinearT, /) -> Tensor:
        """Give x @ weight.T + bias of x (T, in): (T, out), rounded once, after the bias."""


class FuseGated(Protocol[LinearInT]):
    """Makes one kernel of a packed weight (2 I, in), gate's outputs first, and its activation."""

    def __call__(self, packed: LinearInT, activation: str, /) -> Callable[[Tensor], Tensor] | None:
        """Give what makes (T, I) of x (T, in), with the bits of `linear` and then the activation.

        activation: silu or gelu_tanh, which `RowwiseKernels` has as `silu_and_mul` and so on.

        Returns:
            None where the two kernels by themselves serve this weight.
        """


class PackQuantized(Protocol[LinearOutT]):
    """Packs a weight as the codes and scales that quantization.py has for it, to the bit."""

    def __call__(
        self,
        weight: Tensor,
        code_format: CodeFormat,
        bias: Tensor | None,
        quantize_activations: bool,
        /,
    ) -> LinearOutT: ...


class PackCodes(Protocol[LinearOutT]):
    """Packs a weight (out, in) that is codes already; scales and offsets are in float32.

    Groups are 16, 32, 64, 128 or 256 codes. An output element is the sum over groups, in ascending
    order, of scale * (codes . x) + offset * (sum of x).
    """

    def __call__(self, weight: QuantizedWeight, bias: Tensor | None, /) -> LinearOutT: ...
