"""From tokens to rows, and from rows to logits. Rows of prompt_embeds pass through untouched."""

from __future__ import annotations

from torch import Tensor, where

from lora_serve.layers.batch import ForwardBatch
from lora_serve.ops import Ops


class Embedding:
    """weight: (V, H)."""

    def __init__(self, ops: Ops, weight: Tensor) -> None:
        self._ops = ops
        self._weight = weight

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """(T, H), newly allocated: the model adds to it in place."""
        rows = self._ops.embed(self._weight, batch.input_ids, None)
        if batch.inputs_embeds is None or batch.is_embeds is None:
            return rows
        return where(batch.is_embeds[:, None], batch.inputs_embeds, rows)


class LMHead:
    """weight: (V, H). No adapter changes it.

    screened_argmax: finds the largest logits without computing all; None where that is not wanted.
    """

    def __init__(self, ops: Ops, weight: Tensor) -> None:
        self._ops = ops
        self._packed = ops.pack_linear(weight, None)
        pack_screen = ops.pack_screen
        self.screened_argmax = None if pack_screen is None else pack_screen(weight, self._packed)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: (N, H) -> logits (N, V), in the model's dtype."""
        return self._ops.linear(hidden, self._packed)
