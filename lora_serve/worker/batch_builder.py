"""From a step to tensors. Rows of one adapter stand together, so that there are few segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.layers.batch import ForwardBatch
from lora_serve.ops import LoRAPlan, Ops, PackedAdapter
from lora_serve.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """order[i]: index in the step of the request whose rows stand i-th.

    first_row[i]: where its rows begin. forward.logits_indices: the last row of each request of
    `samplers`, which are indices in the step, too.
    """

    forward: ForwardBatch
    order: tuple[int, ...]
    first_row: tuple[int, ...]
    samplers: tuple[int, ...]


class BatchBuilder:
    """hidden_size, dtype: of the rows of prompt_embeds."""

    def __init__(self, ops: Ops, block_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._ops = ops
        self._block_size = block_size
        self._hidden_size = hidden_size
        self._dtype = dtype

    def build(
        self,
        requests: Sequence[ScheduledRequest],
        adapter_of: Callable[[bytes], PackedAdapter],
    ) -> BuiltBatch:
        """One batch of all `requests`, at least one; adapter_of finds weights by digest."""
        order = sorted(range(len(requests)), key=lambda index: _adapter_key(requests[index]))
        rows = [requests[index] for index in order]
        starts = tuple(accumulate((request.num_tokens for request in rows), initial=0))
        samplers = [i for i, request in enumerate(rows) if request.sample is not None]
        block_tables = _block_tables(rows)
        request_of_row, positions = _rows(rows, starts)
        blocks = block_tables[request_of_row, positions // self._block_size].astype(np.int64)
        slot_mapping = blocks * self._block_size + positions % self._block_size
        is_embeds, inputs_embeds = self._embeds(rows, starts)
        forward = ForwardBatch(
            input_ids=torch.tensor([token for request in rows for token in request.token_ids]),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slot_mapping),
            attention=self._ops.plan_attention(
                torch.tensor(starts, dtype=torch.int32),
                torch.tensor([request.end for request in rows], dtype=torch.int32),
                torch.from_numpy(block_tables),
                self._block_size,
            ),
            logits_indices=torch.tensor([starts[i + 1] - 1 for i in samplers], dtype=torch.int64),
            lora=self._plan_lora(rows, starts, adapter_of),
            inputs_embeds=inputs_embeds,
            is_embeds=is_embeds,
        )
        return BuiltBatch(forward, tuple(order), starts, tuple(order[i] for i in samplers))

    def _plan_lora(
        self,
        rows: Sequence[ScheduledRequest],
        starts: Sequence[int],
        adapter_of: Callable[[bytes], PackedAdapter],
    ) -> LoRAPlan | None:
        segments = []
        for digest, group in groupby(range(len(rows)), key=lambda i: _adapter_key(rows[i])):
            members = list(group)
            if digest:
                segments.append((starts[members[0]], starts[members[-1] + 1], adapter_of(digest)))
        return self._ops.plan_lora(segments, starts[-1]) if segments else None

    def _embeds(
        self, rows: Sequence[ScheduledRequest], starts: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which rows prompt_embeds supply (T), and their values (T, H); None if none."""
        if not any(request.embeds for request in rows):
            return None, None
        is_embeds = torch.zeros(starts[-1], dtype=torch.bool)
        values = torch.zeros(starts[-1], self._hidden_size, dtype=self._dtype)
        for request, start in zip(rows, starts, strict=False):
            if request.embeds:
                given = torch.frombuffer(bytearray(request.embeds), dtype=self._dtype)
                given = given.view(-1, self._hidden_size)
                values[start : start + len(given)] = given
                is_embeds[start : start + len(given)] = True
        return is_embeds, values


def _adapter_key(request: ScheduledRequest) -> bytes:
    """The adapter's digest; empty for the base model."""
    return request.adapter.digest if request.adapter is not None else b""


def _rows(
    rows: Sequence[ScheduledRequest], starts: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each row (T): which of `rows` it belongs to, and its absolute position."""
    first_row = np.array(starts[:-1])
    request_of_row = np.repeat(np.arange(len(rows)), np.diff(starts))
    offset = np.array([request.start for request in rows]) - first_row
    return request_of_row, np.arange(starts[-1]) + offset[request_of_row]


def _block_tables(rows: Sequence[ScheduledRequest]) -> npt.NDArray[np.int32]:
    """(R, longest), filled up with block 0, which is not looked at."""
    longest = max(len(request.block_ids) for request in rows)
    tables = np.zeros((len(rows), longest), dtype=np.int32)
    for table, request in zip(tables, rows, strict=True):
        table[: len(request.block_ids)] = request.block_ids
    return tables
