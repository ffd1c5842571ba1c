"""What each rank gets of an adapter and of stored KV, and how their KV becomes one record again.

A record is the same bytes at every number of ranks: that of one rank, which has all heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint, RawTensor, TokenRows
from lora_serve.distributed.shares import RankPlace, Replicated, given
from lora_serve.model_info import Vocabulary
from lora_serve.models.base import LinearLayout, vocabulary_linears
from lora_serve.step import KVLoad


def adapter_share(
    checkpoint: AdapterCheckpoint,
    linears: Sequence[LinearLayout],
    vocabulary: Vocabulary | None,
    place: RankPlace,
) -> AdapterCheckpoint:
    """An adapter for one rank: A whole, since each shrinks by itself, and its outputs of B.

    Of the rows of embeddings it gets its columns, of the LM head's those of its tokens, whose ids
    then count from its first. linears, vocabulary: of the whole model.
    """
    undivided = set(checkpoint.tensor_fields) - {"modules", "token_rows", "biases"}
    assert not undivided, f"ranks do not divide {undivided} of an adapter"
    if place.world_size == 1:
        return checkpoint
    own = {
        name: rows
        for linear in (*linears, *vocabulary_linears(vocabulary))
        for (name, _), rows in zip(linear.projections, linear.own_rows(place), strict=True)
    }
    modules = tuple(replace(m, b=_own_rows(m.b, own[m.name])) for m in checkpoint.modules)
    biases = tuple(replace(b, values=_own_rows(b.values, own[b.name])) for b in checkpoint.biases)
    token_rows = checkpoint.token_rows
    if vocabulary is not None:
        token_rows = tuple(_own_token_rows(each, vocabulary, place) for each in token_rows)
    return replace(checkpoint, modules=modules, token_rows=token_rows, biases=biases)


def bias_shares(
    biases: Mapping[str, Tensor], linears: Sequence[LinearLayout], place: RankPlace
) -> dict[str, Tensor]:
    """What one rank has of the biases of projections. linears: of the whole model."""
    return {
        name: torch.cat([biases[name][rows.start : rows.stop] for rows in own])
        for linear in linears
        for (projection, _), own in zip(linear.projections, linear.own_rows(place), strict=True)
        if (name := f"{projection}.bias") in biases
    }


def _own_token_rows(all_rows: TokenRows, vocabulary: Vocabulary, place: RankPlace) -> TokenRows:
    rows, token_ids = all_rows.rows, all_rows.token_ids
    if all_rows.name == vocabulary.embedding:
        columns = place.share(vocabulary.hidden_size)
        return replace(all_rows, rows=_own_columns(rows, columns))
    share = place.share(vocabulary.size)
    if token_ids is None:
        return replace(all_rows, rows=_own_rows(rows, [share]))
    places = [place for place, token in enumerate(token_ids) if token in share]
    own = _own_rows(rows, [range(place, place + 1) for place in places])
    return replace(
        all_rows, rows=own, token_ids=tuple(token_ids[place] - share.start for place in places)
    )


def _own_columns(rows: RawTensor, columns: range) -> RawTensor:
    count, width = rows.shape
    table = np.frombuffer(rows.data, np.uint8).reshape(count, width, -1)
    own = np.ascontiguousarray(table[:, columns.start : columns.stop])
    return RawTensor(rows.dtype, (count, len(columns)), own.data.cast("B"))


def _own_rows(b: RawTensor, rows: Sequence[range]) -> RawTensor:
    row_bytes = b.data.nbytes // b.shape[0]
    data = b.data.cast("B")
    parts = [data[share.start * row_bytes : share.stop * row_bytes] for share in rows]
    own = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
    return RawTensor(b.dtype, (sum(map(len, rows)), *b.shape[1:]), own)


@dataclass(frozen=True, slots=True)
class KVShares:
    """Divides blocks' bytes by KV heads.

    num_heads: of the whole model. head_bytes: what one of them has in a block of one layer, of K or
    of V.
    """

    num_heads: int
    head_bytes: int

    def split(self, loads: Sequence[KVLoad], place: RankPlace) -> tuple[KVLoad, ...]:
        """Each load's part for one rank."""
        if place.world_size == 1:
            return tuple(loads)
        own = list(Replicated(self.num_heads).share(place))
        return tuple(
            KVLoad(load.block_id, self._by_head(load.data, self.num_heads)[:, own].tobytes())
            for load in loads
        )

    def merge(self, parts: Sequence[Sequence[bytes]]) -> tuple[bytes, ...]:
        """Whole records. parts: of each rank the same records."""
        if len(parts) == 1:
            return tuple(parts[0])
        heads, places = Replicated(self.num_heads), RankPlace(0, len(parts)).all()
        num_own = [len(heads.share(place)) for place in places]
        num_given = [len(given(heads, place)) for place in places]
        return tuple(
            np.concatenate(
                [
                    self._by_head(part, own)[:, own - new :]
                    for part, own, new in zip(record, num_own, num_given, strict=True)
                ],
                axis=1,
            ).tobytes()
            for record in zip(*parts, strict=True)
        )

    def _by_head(
        self, data: bytes | bytearray | memoryview, num_heads: int
    ) -> npt.NDArray[np.uint8]:
        """(blocks * layers * 2, heads, head_bytes)."""
        return np.frombuffer(data, np.uint8).reshape(-1, num_heads, self.head_bytes)
