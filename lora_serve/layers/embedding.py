"""Turns tokens into rows, and rows into logits. Rows of prompt_embeds pass through untouched."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, dtype, float16, where

from lora_serve.layers.batch import ForwardBatch
from lora_serve.layers.gather import Gather
from lora_serve.layers.linear import packed
from lora_serve.layers.vocabulary import HeadChanges
from lora_serve.ops.contract import Ops, Screen, ScreenedArgmax
from lora_serve.ops.quantization import QuantizedWeight


class Embedding:
    """weight: (V, H), or the rank's share of its columns, which `gather` puts together.

    scale: of the tokens' rows, in the model's dtype; None for none.
    """

    def __init__(
        self, ops: Ops, weight: Tensor, scale: float | None = None, gather: Gather | None = None
    ) -> None:
        self._ops = ops
        self._gather = gather
        self._weight = weight
        self._scale = scale

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """(T, H), newly allocated: the model adds to it in place."""
        if batch.embedding_changes:
            rows = self._changed(batch)
        else:
            rows = self._ops.rowwise.embed(self._weight, batch.input_ids, self._scale)
        if self._gather is not None:
            rows = self._gather(rows)
        if batch.inputs_embeds is None or batch.is_embeds is None:
            return rows
        return where(batch.is_embeds[:, None], batch.inputs_embeds, rows)

    def _changed(self, batch: ForwardBatch) -> Tensor:
        """The rows as adapters have them, in front of the scale."""
        ops, input_ids = self._ops, batch.input_ids
        rows = ops.rowwise.embed(self._weight, input_ids, None)
        for start, end, change in batch.embedding_changes:
            change.apply(ops, rows[start:end], input_ids[start:end])
        return rows if self._scale is None else ops.rowwise.scale(rows, self._scale)


class LMHead:
    """weight: (V, H), or the rank's share of its rows.

    Codes only where `ops` packs them; they are never screened.
    soft_cap: as RowwiseKernels.soft_cap takes it; None for plain logits. scale: of the logits,
        above 0; None for none. They are scaled first.
    gather: puts the logits of all ranks together. argmax_of_all: makes of a screen of this rank's
        share one of all; None for a whole LM head.
    screened_argmax: finds the largest logits of rows without changes, without computing all; None
        where that is not wanted, or where what is done to logits can make two of them equal, since
        then the first counts. `ScreenedTokens` where the logits are its own products.
    """

    def __init__(
        self,
        ops: Ops,
        weight: Tensor | QuantizedWeight,
        soft_cap: float | None = None,
        scale: float | None = None,
        gather: Gather | None = None,
        argmax_of_all: Callable[[Screen], ScreenedArgmax] | None = None,
    ) -> None:
        self._ops = ops
        self._gather = gather
        self._soft_cap = soft_cap
        self._scale = scale
        self._packed = packed(ops, weight, None)
        self.screened_argmax: ScreenedArgmax | None = None
        if isinstance(weight, QuantizedWeight):
            return  # there is nothing of fewer bytes to look at first
        keeps_order = soft_cap is None and (scale is None or _is_exact(scale, weight.dtype))
        pack_screen = ops.pack_screen if keeps_order else None
        screen = None if pack_screen is None else pack_screen(weight, self._packed)
        if screen is not None and argmax_of_all is not None:
            self.screened_argmax = argmax_of_all(screen)
        elif screen is not None and scale is not None:
            self.screened_argmax = screen.__call__  # a draw would need the scaled logits
        else:
            self.screened_argmax = screen

    def __call__(self, hidden: Tensor, changes: HeadChanges = ()) -> Tensor:
        """hidden: (N, H) -> logits (N, V), in the model's dtype. changes: by rows' adapters."""
        logits = self._ops.linears.linear(hidden, self._packed)
        for start, end, change in changes:
            change.apply(self._ops, logits[start:end], hidden[start:end])
        if self._scale is not None:
            logits = self._ops.rowwise.scale(logits, self._scale)
        if self._soft_cap is not None:
            logits = self._ops.rowwise.soft_cap(logits, self._soft_cap)
        return logits if self._gather is None else self._gather(logits)


def _is_exact(scale: float, of: dtype) -> bool:
    """Whether no two numbers become one: a power of two, in a type of many exponents."""
    return math.frexp(scale)[0] == 0.5 and of != float16
