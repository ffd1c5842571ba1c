"""Makes the parts that all decoders have, out of a rank's shares of their weights.

A linear layer is divided by what it gives, never by what it takes: its outputs are whole sums.
Attention is divided by heads, the LM head by tokens, embeddings by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.distributed.group import Group
from lora_serve.distributed.shares import RankPlace, place_of
from lora_serve.layers.attention import HeadLayout
from lora_serve.layers.embedding import Embedding, LMHead
from lora_serve.layers.gather import Gather
from lora_serve.layers.linear import Linear
from lora_serve.models.base import LinearLayout, Weights
from lora_serve.models.decoder_shape import EMBEDDING, LM_HEAD, DecoderShape
from lora_serve.ops.contract import Ops
from lora_serve.ops.quantization import QuantizedWeight, stacked


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Takes the weights of a decoder; each of its parts is made once."""

    shape: DecoderShape
    weights: Weights
    ops: Ops
    group: Group

    @property
    def heads(self) -> HeadLayout:
        """Those of this rank."""
        shape, place = self.shape, self._place
        return HeadLayout(
            place.even_share(shape.num_heads),
            place.even_share(shape.num_kv_heads),
            shape.head_size,
        )

    def embeddings(self) -> tuple[Tensor, Tensor | None]:
        """This rank's columns of the embeddings, and its rows if they are the LM head, too."""
        shape, place = self.shape, self._place
        weight = self.weights.take(shape.named(EMBEDDING))
        columns = _own(weight, 1, place.share(shape.hidden_size))
        if not shape.tie_word_embeddings:
            return columns, None
        return columns, _own(weight, 0, place.share(shape.vocab_size))

    def embedding(self, columns: Tensor, scale: float | None = None) -> Embedding:
        return Embedding(self.ops, columns, scale, self._gather(self.shape.hidden_size))

    def lm_head(
        self, tied: Tensor | None, soft_cap: float | None = None, scale: float | None = None
    ) -> LMHead:
        """tied: this rank's rows of the embeddings, if these are the LM head."""
        vocab_size = self.shape.vocab_size
        if tied is None:
            tied = _own(self.weights.take(LM_HEAD), 0, self._place.share(vocab_size))
        return LMHead(self.ops, tied, soft_cap, scale, self._gather(vocab_size))

    def linear(self, layout: LinearLayout) -> Linear:
        """A layer of whole rows, which gives this rank's share of each projection."""
        return self._linear(layout, None, None)

    def gathered_linear(self, layout: LinearLayout) -> Linear:
        """A layer that takes what the ranks have of each row, and gives whole rows."""
        ((_, out_features),) = layout.projections
        return self._linear(layout, self._gather(layout.in_features), self._gather(out_features))

    def _linear(
        self, layout: LinearLayout, gather_in: Gather | None, gather_out: Gather | None
    ) -> Linear:
        rows, order = layout.own_rows(self._place), layout.of_rank(self._place).head_order
        bias: Tensor | None = None
        weights, biases = [], []
        for (name, _), shares in zip(layout.projections, rows, strict=True):
            weight = self.weights.take_matrix(f"{name}.weight")
            weights += [_own_rows(weight, share) for share in shares]
            if layout.has_bias:
                whole = self.weights.take(f"{name}.bias")
                biases += [_own(whole, 0, share) for share in shares]
        fused = _fused(weights)
        if layout.has_bias:
            bias = torch.cat(biases)
        if order is not None:
            reorder = order.reorder
            fused = (
                fused.with_rows(reorder) if isinstance(fused, QuantizedWeight) else reorder(fused)
            )
            bias = None if bias is None else reorder(bias)
        return Linear(self.ops, fused, bias, layout.index, gather_in, gather_out)

    @property
    def _place(self) -> RankPlace:
        return place_of(self.group)

    def _gather(self, width: int) -> Gather | None:
        return Gather(self.ops, self.group, width) if self.group.world_size > 1 else None


def _own(weight: Tensor, dim: int, share: range) -> Tensor:
    """A rank's share of what one dimension has; the rest of the memory is given back."""
    if len(share) == weight.shape[dim]:
        return weight
    return weight.narrow(dim, share.start, len(share)).clone(memory_format=torch.contiguous_format)


def _own_rows(weight: Tensor | QuantizedWeight, share: range) -> Tensor | QuantizedWeight:
    if isinstance(weight, QuantizedWeight):
        return weight.with_rows(lambda rows: _own(rows, 0, share))
    return _own(weight, 0, share)


def _fused(parts: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """One matrix with the rows of all: codes where all are."""
    if len(parts) == 1:
        return parts[0]
    codes = [part for part in parts if isinstance(part, QuantizedWeight)]
    floats = [part for part in parts if isinstance(part, Tensor)]
    if not floats:
        return stacked(codes)
    dtype = floats[0].dtype
    return torch.cat([p if isinstance(p, Tensor) else p.dequantized().to(dtype) for p in parts])
