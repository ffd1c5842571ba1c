"""The loop over layers that all decoder families share, between embedding and LM head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.embedding import Embedding, LMHead
from lora_serve.layers.norm import Norm
from lora_serve.layers.vocabulary import HeadChanges
from lora_serve.ops.contract import ScreenedArgmax


class DecoderLayer(Protocol):
    """A layer between whose parts a residual is carried on.

    input_norm: applied before it, together with the addition that the layer before left open.
    """

    input_norm: Norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv_cache: Tensor,
        outputs: OutputRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What is to be added next, and the residual to add it to.

        x: what input_norm gave. outputs: go on with these rows alone, once KV is written.
        """


class Decoder:
    """A `Model` of such layers."""

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: Norm,
        lm_head: LMHead,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        residual = self._embedding(batch)
        x = None  # what is to be added to it
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            outputs = batch.outputs if layer is self._layers[-1] else None
            norm = layer.input_norm
            normed = norm(residual) if x is None else norm.add(x, residual)
            x, residual = layer(normed, residual, batch, kv_cache, outputs)
        assert x is not None, "a model has layers"
        return self._final_norm.add(x, residual)

    def logits(self, hidden: Tensor, changes: HeadChanges = ()) -> Tensor:
        return self._lm_head(hidden, changes)

    @property
    def screened_argmax(self) -> ScreenedArgmax | None:
        return self._lm_head.screened_argmax
