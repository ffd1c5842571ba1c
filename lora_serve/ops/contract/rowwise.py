"""What kernels do that take every row by itself: embeddings, norms, activations."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RowwiseKernels(Protocol):
    """Kernels that take every row by itself. Each of them can be swapped alone."""

    def embed(self, weight: Tensor, input_ids: Tensor, scale: float | None, /) -> Tensor:
        """Look rows of weight (V, H) up by input_ids (T), int64.

        Returns:
            (T, H), newly allocated: the rows as they are; or times scale, rounded once.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Give x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension.

        Args:
            x: (N, D); or (T, heads, D), a token's heads side by side, tokens at any stride.
            weight: (D), of x's dtype or float32, contiguous.
            eps: added to the mean of squares.

        Returns:
            x's shape, contiguous, newly allocated.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Add x (T, H) to residual (T, H) in place, rounded to its dtype; return its `rms_norm`.

        residual: contiguous.
        """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, /) -> Tensor:
        """Give (x - mean) / sqrt(variance + eps) * weight + bias, both over the last dimension.

        Args:
            x: (T, H), contiguous.
            weight, bias: (H), of x's dtype, contiguous.
            eps: added to the variance, the mean of (x - mean)^2.

        Returns:
            (T, H), contiguous, newly allocated.
        """

    def add(self, x: Tensor, residual: Tensor, /) -> Tensor:
        """Add x (T, H) to residual (T, H), contiguous, in place, rounded once; return residual."""

    def scale(self, x: Tensor, factor: float, /) -> Tensor:
        """Multiply x, contiguous, by factor in place, rounded once; return it."""

    def silu_and_mul(self, x: Tensor, /) -> Tensor:
        """Give silu(x[:, :I]) * x[:, I:] of x (T, 2 I): (T, I), where silu(g) = g / (1 + e^-g)."""

    def gelu_tanh_and_mul(self, x: Tensor, /) -> Tensor:
        """`silu_and_mul` with gelu in its form with tanh in the place of silu.

        gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
        """

    def gelu_tanh(self, x: Tensor, /) -> Tensor:
        """Make gelu(x), as `gelu_tanh_and_mul` has it, of x (T, I), contiguous, in place."""

    def soft_cap(self, logits: Tensor, cap: float, /) -> Tensor:
        """Make cap * tanh(logits / cap) of logits (N, V), contiguous, in place; return them.

        cap: above 0. Two logits may round to one: an LM head that is capped is not screened.
        """
