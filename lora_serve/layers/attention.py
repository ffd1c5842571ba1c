"""Self-attention over the paged cache: fused q k v, rotary positions, grouped heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.host_made import Clip
from lora_serve.layers.linear import Linear, RowsLinear
from lora_serve.ops.contract import Ops


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a fused row of q, k and v is divided."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, (Hq + 2 Hkv) D) -> views q (T, Hq, D), k and v (T, Hkv, D)."""
        heads = qkv.view(qkv.shape[0], -1, self.head_size)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return q, k, v


class Attention:
    """One layer's attention.

    layer: its number, by which it finds its part of a batch. q_norm, k_norm: of q (T, Hq, D) and of
    k (T, Hkv, D), or None.
    cos_sin: (P, D), float32, from `rotary_table`. scale: of the products q k. sliding_window: query
    p sees (p - sliding_window, p]; None: all of [0, p]. softcap, sinks: as
    Ops.paged_attention has them. clip: of normed q and k, and of v; None for none.
    """

    def __init__(
        self,
        ops: Ops,
        heads: HeadLayout,
        *,
        layer: int,
        qkv: Linear,
        output: RowsLinear,
        q_norm: Callable[[Tensor], Tensor] | None,
        k_norm: Callable[[Tensor], Tensor] | None,
        cos_sin: Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        clip: Clip | None = None,
    ) -> None:
        self._ops = ops
        self._heads = heads
        self._layer = layer
        self._qkv = qkv
        self._output = output
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._cos_sin = cos_sin
        self._scale = scale
        self._sliding_window = sliding_window
        self._softcap = softcap
        self._sinks = sinks
        self._clip = clip

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv_cache: Tensor,
        outputs: OutputRows | None,
    ) -> tuple[Tensor, Tensor, ForwardBatch | OutputRows]:
        """Write the K and V of all rows, and attend for those that go on.

        Args:
            x, residual: (T, H).
            outputs: the R rows that go on; None for all.

        Returns:
            What they attended to and their residual, (R, H), and the rows as the layers behind
            take them.
        """
        q = self._queries(x, batch, kv_cache)
        rows: ForwardBatch | OutputRows = batch
        if outputs is not None:
            rows = outputs
            q, residual = (each.index_select(0, outputs.rows) for each in (q, residual))
        return self._attend(q, rows, kv_cache), residual, rows

    def _queries(self, x: Tensor, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """x: (T, H) -> (T, Hq, D). Writes the rows' K and V."""
        q, k, v = self._heads.split(self._qkv(x, batch))
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        if self._clip is not None:
            for each in (q, k, v):
                self._clip(each)
        self._ops.attention.rotary_and_write_kv(
            q, k, v, self._cos_sin, batch.positions, kv_cache, batch.slot_mapping[self._layer]
        )
        return q

    def _attend(self, q: Tensor, rows: ForwardBatch | OutputRows, kv_cache: Tensor) -> Tensor:
        """q: (T, Hq, D), of `rows` -> (T, H). All that they see has been written."""
        attended = self._ops.attention.paged_attention(
            q,
            kv_cache,
            rows.attention[self._layer],
            self._scale,
            self._sliding_window,
            self._softcap,
            self._sinks,
        )
        return self._output(attended.view(q.shape[0], -1), rows)
