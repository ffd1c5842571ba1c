"""Makes of what a checkpoint holds for embeddings and LM head what the layers apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.adapter_checkpoint import LoRAModule, RawTensor, TokenRows
from lora_serve.layers.vocabulary import EmbeddingChange, HeadChange, LowRank
from lora_serve.ops.contract import Ops


@dataclass(frozen=True, slots=True)
class VocabularyReader:
    """Reads what an adapter changes of one rank's share of the vocabulary.

    upload: brings a tensor to the device, rounded. embedding, head: the matrices' names.
    """

    ops: Ops
    upload: Callable[[RawTensor], Tensor]
    embedding: str
    head: str

    def embedding_change(
        self, modules: Mapping[str, LoRAModule], token_rows: Mapping[str, TokenRows]
    ) -> EmbeddingChange | None:
        """What there is under the embeddings' name; None for nothing."""
        module, rows = modules.get(self.embedding), token_rows.get(self.embedding)
        if module is None and rows is None:
            return None
        a, delta = None, None
        if module is not None:
            a = self.upload(module.a).t().contiguous()
            b = self.upload(module.b)
            # Looking a token up is all of the first product, so the kernel's leaves that alone.
            unchanged = torch.eye(module.rank, dtype=b.dtype, device=b.device)
            delta = LowRank.pack(self.ops, unchanged, b, module.scale)
        if rows is None:
            return EmbeddingChange(a=a, delta=delta)
        values, token_ids = self._in_order(rows)
        return EmbeddingChange(values, token_ids, a, delta)

    def head_change(
        self, modules: Mapping[str, LoRAModule], token_rows: Mapping[str, TokenRows]
    ) -> HeadChange | None:
        """What there is under the LM head's name; None for nothing, though a share may be empty."""
        module, rows = modules.get(self.head), token_rows.get(self.head)
        if module is None and rows is None:
            return None
        delta = None
        if module is not None:
            a, b = self.upload(module.a), self.upload(module.b)
            delta = LowRank.pack(self.ops, a, b, module.scale)
        if rows is None or rows.rows.shape[0] == 0:
            return HeadChange(delta=delta)
        values, token_ids = self._in_order(rows)
        return HeadChange(self.ops.linears.pack_rows(values), token_ids, delta)

    def _in_order(self, rows: TokenRows) -> tuple[Tensor, Tensor | None]:
        """The rows (n, H) of ascending token ids (n), int64; None for all."""
        values = self.upload(rows.rows)
        if rows.token_ids is None:
            return values, None
        ids = torch.tensor(rows.token_ids, device=values.device)
        ordered, order = ids.sort()
        return values[order], ordered
