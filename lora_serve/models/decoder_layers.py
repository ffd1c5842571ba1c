"""The two data flows of a decoder layer: its parts one behind the other, or side by side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lora_serve.layers.attention import Attention
from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.experts import ExpertsMLP
from lora_serve.layers.mlp import GatedMLP, PlainMLP
from lora_serve.layers.norm import Norm
from lora_serve.ops.contract import Ops

MLP = GatedMLP | PlainMLP | ExpertsMLP


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The norms around both parts; None behind a part: it has none."""

    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
    after_mlp: Norm | None


class SequentialLayer:
    """A `DecoderLayer` whose MLP reads what attention has added.

    residual_scale: of what either part adds; None for none.
    """

    def __init__(
        self,
        ops: Ops,
        attention: Attention,
        mlp: MLP,
        norms: LayerNorms,
        residual_scale: float | None = None,
    ) -> None:
        self._ops = ops
        self._attention = attention
        self._mlp = mlp
        self._norms = norms
        self._residual_scale = residual_scale
        self.input_norm = norms.before_attention

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv_cache: Tensor,
        outputs: OutputRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Do what `DecoderLayer` says."""
        attended, residual, rows = self._attention(x, residual, batch, kv_cache, outputs)
        added = self._added(attended, self._norms.after_attention)
        mixed = self._mlp(self._norms.before_mlp.add(added, residual), rows)
        return self._added(mixed, self._norms.after_mlp), residual

    def _added(self, y: Tensor, norm: Norm | None) -> Tensor:
        """What a part that gave y adds to the residual."""
        if norm is not None:
            y = norm(y)
        return (
            y if self._residual_scale is None else self._ops.rowwise.scale(y, self._residual_scale)
        )


class ParallelLayer:
    """A `DecoderLayer` whose attention and MLP read one norm, and add to one residual."""

    def __init__(self, ops: Ops, attention: Attention, mlp: MLP, input_norm: Norm) -> None:
        self._ops = ops
        self._attention = attention
        self._mlp = mlp
        self.input_norm = input_norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv_cache: Tensor,
        outputs: OutputRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Do what `DecoderLayer` says."""
        attended, residual, rows = self._attention(x, residual, batch, kv_cache, outputs)
        if outputs is not None:
            x = x.index_select(0, outputs.rows)
        self._ops.rowwise.add(attended, residual)
        return self._mlp(x, rows), residual
