"""What adapters change of the two matrices that have a row for each token.

Rows are replaced first, and low-rank deltas added to what stands there then. Nothing of this is
recorded: steps with an adapter that changes embeddings run without a graph, and logits always do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.ops.contract import LoRAPart, Ops, PackedAdapter, PackedLinear


@dataclass(frozen=True, slots=True)
class LowRank:
    """A delta of low rank as an adapter of one linear layer."""

    packed: PackedAdapter

    @classmethod
    def pack(cls, ops: Ops, a: Tensor, b: Tensor, scale: float) -> LowRank:
        """a, b: as of LoRAPart."""
        return cls(ops.adapters.pack_adapter([[LoRAPart(a, b, scale, 0)]]))

    def add(self, ops: Ops, y: Tensor, x: Tensor) -> None:
        """Add the delta of x (T, in) to y (T, out), contiguous, in place."""
        plan = ops.adapters.plan_lora([(0, len(y), self.packed)], len(y))
        ops.adapters.lora(y, x, plan, 0)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingChange:
    """What one adapter changes of the embeddings, or of this rank's columns of them.

    rows: (n, H) of token_ids (n), int64, ascending; token_ids None: all V rows. None: no rows.
    a: (V, LoRA rank): what a token gives to the low-rank delta. delta: of these; None for none.
    """

    rows: Tensor | None = None
    token_ids: Tensor | None = None
    a: Tensor | None = None
    delta: LowRank | None = None

    def apply(self, ops: Ops, embedded: Tensor, input_ids: Tensor) -> None:
        """Make of embedded (T, H), contiguous, in place, the adapter's rows of input_ids (T)."""
        if self.rows is not None:
            embedded.copy_(self._replaced(self.rows, embedded, input_ids))
        if self.delta is not None and self.a is not None:
            self.delta.add(ops, embedded, self.a[input_ids])

    def _replaced(self, rows: Tensor, embedded: Tensor, input_ids: Tensor) -> Tensor:
        if self.token_ids is None:
            return rows[input_ids]
        places = torch.searchsorted(self.token_ids, input_ids).clamp_(max=len(rows) - 1)
        is_changed = self.token_ids[places] == input_ids
        return torch.where(is_changed[:, None], rows[places], embedded)


@dataclass(frozen=True, slots=True, eq=False)
class HeadChange:
    """What one adapter changes of the LM head, or of this rank's rows of it.

    rows: packed, of token_ids (n), int64; token_ids None: all V rows. None: no rows here.
    delta: None for none.
    """

    rows: PackedLinear | None = None
    token_ids: Tensor | None = None
    delta: LowRank | None = None

    def apply(self, ops: Ops, logits: Tensor, hidden: Tensor) -> None:
        """Make of logits (N, V), contiguous, in place, the adapter's of hidden (N, H)."""
        if self.rows is not None:
            own = ops.linears.linear(hidden, self.rows)
            if self.token_ids is None:
                logits.copy_(own)
            else:
                logits.index_copy_(1, self.token_ids, own)
        if self.delta is not None:
            self.delta.add(ops, logits, hidden)


# (start, end, change), disjoint ranges of rows in ascending order.
EmbeddingChanges = Sequence[tuple[int, int, EmbeddingChange]]
HeadChanges = Sequence[tuple[int, int, HeadChange]]
