"""Turns a step into rows (`batch_rows.py`), and these into what a model takes.

Rows of one adapter stand together: few segments.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.identity import BASE_MODEL
from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.biases import LayerBiases
from lora_serve.layers.expert_lora import ExpertAdapters
from lora_serve.layers.vocabulary import EmbeddingChange
from lora_serve.ops.contract import AttentionPlan, LoRAPlan, Ops, PackedAdapter
from lora_serve.ops.recorded_steps import Int32Array
from lora_serve.step import ScheduledRequest
from lora_serve.worker.batch_rows import BatchRows, Int64Array, Outputs, PendingTokens
from lora_serve.worker.device import Device

T = TypeVar("T")

_NO_BIASES: Mapping[bytes, LayerBiases] = {}
_NO_EXPERTS: Mapping[bytes, ExpertAdapters] = {}
_NO_CHANGES: Mapping[bytes, EmbeddingChange] = {}


class BatchBuilder:
    """Makes batches for a model whose layer i has the block tables of group group_of[i].

    hidden_size, dtype: of the rows of prompt_embeds.
    """

    def __init__(
        self,
        ops: Ops,
        device: Device,
        block_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        group_of: Sequence[int],
    ) -> None:
        self._ops = ops
        self._device = device
        self._block_size = block_size
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._group_of = group_of
        self._groups = range(max(group_of) + 1)

    def lay_out(
        self,
        requests: Sequence[ScheduledRequest],
        adapter_of: Callable[[bytes], PackedAdapter],
        embedding_changes: Mapping[bytes, EmbeddingChange] = _NO_CHANGES,
        biases: Mapping[bytes, LayerBiases] = _NO_BIASES,
        experts: Mapping[bytes, ExpertAdapters] = _NO_EXPERTS,
    ) -> BatchRows:
        """The rows of all `requests`, at least one.

        adapter_of finds weights by digest. embedding_changes, biases, experts: by digest, of
        adapters that have any.
        """
        keys = [_adapter_key(request) for request in requests]
        order = tuple(sorted(range(len(requests)), key=keys.__getitem__))
        members = [requests[index] for index in order]
        counts = [len(request.token_ids) for request in members]
        starts = tuple(accumulate(counts, initial=0))
        num_outputs = _num_outputs(members, counts)
        ends = tuple(accumulate(num_outputs, initial=0))
        samplers = [i for i, request in enumerate(members) if request.asked.samples]
        pending = [i for i, request in enumerate(members) if request.token_from is not None]
        is_embeds, inputs_embeds = self._embeds(members, starts)
        return BatchRows(
            num_rows=starts[-1],
            order=order,
            query_start_loc=starts,
            outputs=self._outputs(members, starts, num_outputs, adapter_of, biases, experts),
            output_start_loc=ends,
            samplers=tuple([order[i] for i in samplers]),
            logits_indices=_logits_indices(members, samplers, ends),
            columns=self._columns(members, counts),
            pending_rows=tuple([starts[i] for i in pending]),
            token_sources=tuple([members[i].token_from or 0 for i in pending]),
            seq_lens=_seq_lens(members),
            block_tables=tuple([_block_tables(members, group) for group in self._groups]),
            segments=_segments(members, starts, adapter_of) if keys[order[-1]] else (),
            is_embeds=is_embeds,
            inputs_embeds=inputs_embeds,
            embedding_changes=(
                _segments(members, starts, embedding_changes.get) if embedding_changes else ()
            ),
            biases=_segments(members, starts, biases.get) if biases else (),
            experts=_segments(members, starts, experts.get) if experts else (),
        )

    def to_device(self, rows: BatchRows, pending: PendingTokens | None = None) -> ForwardBatch:
        """The rows as the model takes them."""
        count = rows.num_rows
        values = rows.columns.reshape(-1)
        num_values = len(values)
        if rows.outputs is not None:
            values = np.concatenate((values, rows.outputs.rows))
        table = self._device.upload(torch.from_numpy(values))
        input_ids, positions, *slots = table[:num_values].view(-1, count)
        plans = [self._attention_of(rows, tables) for tables in rows.block_tables]
        if pending is not None:
            pending.put_into(input_ids)
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=by_layer(slots, self._group_of),
            attention=by_layer(plans, self._group_of),
            lora=self._lora_of(rows),
            inputs_embeds=self._upload(rows.inputs_embeds),
            is_embeds=self._upload(rows.is_embeds),
            outputs=self._outputs_to_device(rows.outputs, table[num_values:]),
            embedding_changes=rows.embedding_changes,
            biases=rows.biases,
            experts=rows.experts,
        )

    def _attention_of(self, rows: BatchRows | Outputs, block_tables: Int32Array) -> AttentionPlan:
        starts = np.array(rows.query_start_loc, np.int32)
        return self._ops.attention.plan_attention(
            torch.from_numpy(starts),
            torch.from_numpy(rows.seq_lens),
            torch.from_numpy(block_tables),
            self._block_size,
        )

    def _lora_of(self, rows: BatchRows | Outputs) -> LoRAPlan | None:
        return (
            self._ops.adapters.plan_lora(rows.segments, rows.query_start_loc[-1])
            if rows.segments
            else None
        )

    def _outputs_to_device(self, outputs: Outputs | None, indices: Tensor) -> OutputRows | None:
        if outputs is None:
            return None
        plan = self._attention_of(outputs, outputs.block_tables)
        last = len(self._group_of) - 1
        return OutputRows(
            indices, {last: plan}, self._lora_of(outputs), outputs.biases, outputs.experts
        )

    def _columns(self, members: Sequence[ScheduledRequest], counts: Sequence[int]) -> Int64Array:
        """Each row's token, absolute position, and for each group its slot in the KV caches."""
        size = self._block_size
        if max(counts) == 1:  # most steps: no arrays of one
            values = [member.token_ids[0] for member in members]
            values += [member.start for member in members]
            for group in self._groups:
                values += [
                    member.block_tables[group][member.start // size] * size + member.start % size
                    for member in members
                ]
            return np.array(values, np.int64).reshape(-1, len(members))
        token_ids = [np.array(member.token_ids, np.int64) for member in members]
        positions = [np.arange(member.start, member.end) for member in members]
        slots = [
            [
                _slots(member.block_tables[group], at, size)
                for member, at in zip(members, positions, strict=True)
            ]
            for group in self._groups
        ]
        return np.array([np.concatenate(column) for column in (token_ids, positions, *slots)])

    def _outputs(
        self,
        members: Sequence[ScheduledRequest],
        starts: Sequence[int],
        num_outputs: Sequence[int],
        adapter_of: Callable[[bytes], PackedAdapter],
        biases: Mapping[bytes, LayerBiases],
        experts: Mapping[bytes, ExpertAdapters],
    ) -> Outputs | None:
        if sum(num_outputs) == starts[-1]:
            return None
        asked = [i for i, count in enumerate(num_outputs) if count]
        query_start_loc = tuple(accumulate((num_outputs[i] for i in asked), initial=0))
        some = [members[i] for i in asked]
        return Outputs(
            rows=np.concatenate(
                [np.arange(starts[i + 1] - num_outputs[i], starts[i + 1]) for i in asked]
            ),
            query_start_loc=query_start_loc,
            seq_lens=_seq_lens(some),
            block_tables=_block_tables(some, self._group_of[-1]),
            segments=_segments(some, query_start_loc, adapter_of),
            biases=_segments(some, query_start_loc, biases.get) if biases else (),
            experts=_segments(some, query_start_loc, experts.get) if experts else (),
        )

    def _upload(self, host: Tensor | None) -> Tensor | None:
        return self._device.upload(host) if host is not None else None

    def _embeds(
        self, members: Sequence[ScheduledRequest], starts: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which rows prompt_embeds supply (T), and their values (T, H); None if none."""
        if not any(member.embeds.runs for member in members):
            return None, None
        is_embeds = torch.zeros(starts[-1], dtype=torch.bool)
        values = torch.zeros(starts[-1], self._hidden_size, dtype=self._dtype)
        for member, start in zip(members, starts, strict=False):
            if member.embeds.runs:
                rows = torch.frombuffer(bytearray(member.embeds.data), dtype=self._dtype)
                places = [
                    start + place + index
                    for place, count in member.embeds.runs
                    for index in range(count)
                ]
                values[places] = rows.view(-1, self._hidden_size)
                is_embeds[places] = True
        return is_embeds, values


def _num_outputs(members: Sequence[ScheduledRequest], counts: Sequence[int]) -> list[int]:
    """How many of its last hidden states are asked for of each request, of `counts` rows.

    All where that costs nothing, and one at least in all, since no kernel is made for none.
    """
    if max(counts) == 1:
        return [1] * len(members)
    asked = [member.asked.num_rows(count) for member, count in zip(members, counts, strict=True)]
    return asked if any(asked) else [1, *asked[1:]]


def _logits_indices(
    members: Sequence[ScheduledRequest], samplers: Sequence[int], ends: Sequence[int]
) -> tuple[int, ...]:
    """The rows that are sampled: the last ones of each sampler's outputs, which end at `ends`."""
    return tuple(
        [
            row
            for i in samplers
            for row in range(ends[i + 1] - len(members[i].asked.samples), ends[i + 1])
        ]
    )


def _adapter_key(request: ScheduledRequest) -> bytes:
    """The adapter's digest; empty for the base model."""
    return request.adapter.digest if request.adapter is not BASE_MODEL else b""


def _seq_lens(members: Sequence[ScheduledRequest]) -> Int32Array:
    return np.array([member.end for member in members], np.int32)


def _segments(
    members: Sequence[ScheduledRequest],
    starts: Sequence[int],
    adapter_of: Callable[[bytes], T | None],
) -> tuple[tuple[int, int, T], ...]:
    """members: with rows [starts[i], starts[i + 1]), the last ones of their chunks."""
    segments: list[tuple[int, int, T]] = []
    for digest, group in groupby(range(len(members)), key=lambda i: _adapter_key(members[i])):
        if not digest:
            continue
        indices, adapter = list(group), adapter_of(digest)
        if adapter is None:
            continue
        if not any(members[i].adapter_start for i in indices):
            segments.append((starts[indices[0]], starts[indices[-1] + 1], adapter))
            continue
        for i in indices:
            start, end = starts[i], starts[i + 1]
            num_with_adapter = members[i].end - members[i].adapter_start
            if num_with_adapter > 0:
                segments.append((max(start, end - num_with_adapter), end, adapter))
    return tuple(segments)


def _block_tables(members: Sequence[ScheduledRequest], group: int) -> Int32Array:
    """(R, longest), filled up with block 0, which is not looked at."""
    block_ids = [array("i", member.block_tables[group]) for member in members]
    counts = list(map(len, block_ids))
    longest = max(counts)
    numbers = np.frombuffer(bytearray().join(block_ids), np.int32)
    if len(numbers) == longest * len(members):
        return numbers.reshape(-1, longest)
    tables = np.zeros((len(members), longest), np.int32)
    tables[np.arange(longest) < np.array(counts)[:, None]] = numbers
    return tables


def _slots(
    block_ids: Sequence[int], positions: npt.NDArray[np.int64], block_size: int
) -> npt.NDArray[np.int64]:
    blocks = np.asarray(block_ids, np.int64)[positions // block_size]
    return blocks * block_size + positions % block_size


def by_layer(of_groups: Sequence[T], group_of: Sequence[int]) -> tuple[T, ...]:
    """What each layer's group has."""
    return tuple([of_groups[group] for group in group_of])
