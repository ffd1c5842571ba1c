"""Steps recorded once and replayed: the same work without a launch for each kernel.

The one rule: what a recorded step reads lies in buffers that it owns, at addresses that never
change; a step is run by filling them and replaying. A step takes the smallest graph of its kind
that has rows enough; the others are padding, which no kernel reads KV for or writes it from. What
is recorded is exactly the model's forward, so a graph and an eager step run the same kernels. A
graph gives the hidden states of all rows: which of them are asked for changes from step to step.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lora_serve.layers.batch import ForwardBatch
from lora_serve.ops.contract import StepPlans
from lora_serve.ops.recorded_steps import Record, RecordedWork
from lora_serve.worker.batch_builder import by_layer
from lora_serve.worker.batch_rows import BatchRows, PendingTokens
from lora_serve.worker.device import Device

_PADDING_SLOT = -1
_MOST_EXACT_ROWS = 64

Forward = Callable[[ForwardBatch], Tensor]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Rows of the steps to record, ascending. decode: one a request; mixed: some have several.

    on_use: only the largest of each kind is recorded at once, which tells whether the others can
    be; each of them is recorded by the first step that takes it.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...] = ()
    on_use: bool = False


def graph_sizes(max_num_seqs: int, max_num_batched_tokens: int, most_rows: int) -> GraphSizes:
    """Close where a row counts, and never twice what is needed but for a handful of rows.

    most_rows: of a recorded step. Beyond it kernels take so long that launching them is hidden.
    """
    decode = (1, 2, 4, 8, 16, 24, *range(32, most_rows + 1, 32))
    mixed = (16, 32, *range(64, most_rows + 1, 64))
    return GraphSizes(
        _ending_with(min(max_num_seqs, most_rows), decode),
        _ending_with(min(max_num_batched_tokens, most_rows), mixed),
    )


def exact_sizes(max_num_seqs: int, most_rows: int, max_draft_rows: int = 0) -> GraphSizes:
    """All, where recording costs little and a row of padding costs as much as any other.

    max_draft_rows: of steps that verify drafts. Prompts' steps are not recorded beyond that: few of
    them have the same number of rows.

    Beyond them a step's kernels take so long that what is between them does not count. There are so
    many that a start would take seconds for them, and so cheap that a step does not notice one: 20
    to 30 ms for 24 layers.
    """
    most = min(max_num_seqs, most_rows, _MOST_EXACT_ROWS)
    most_mixed = min(max_draft_rows, most_rows, _MOST_EXACT_ROWS)
    return GraphSizes(tuple(range(1, most + 1)), mixed=tuple(range(2, most_mixed + 1)), on_use=True)


def _ending_with(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)


class StepKind(NamedTuple):
    """What steps must have in common to be one recording with other numbers."""

    is_decode: bool
    has_adapters: bool


class StepRecorder:
    """Records the steps of one model."""

    def __init__(
        self,
        device: Device,
        plans: StepPlans,
        forward: Forward,
        sizes: GraphSizes,
        *,
        record: Record,
        max_blocks: int,
        block_size: int,
        group_of: Sequence[int],
        with_lora: bool,
    ) -> None:
        """max_blocks: of the longest request. group_of: each layer's group, as BatchBuilder has it.

        with_lora: steps with adapters as well as without.
        """
        self._device = device
        self._plans = plans
        self._record = record
        self._forward = forward
        self._sizes = sizes
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._group_of = group_of
        self._with_lora = with_lora

    def record(self) -> StepGraphs:
        """Record steps of all sizes and kinds, or of each kind the largest (GraphSizes.on_use).

        Raises:
            NotRecordableError: this model's steps cannot be.
        """
        sizes = {kind: self._sizes_of(kind) for kind in self._kinds()}
        graphs = StepGraphs(sizes, self._graph)
        steps = [(size, kind) for kind in sizes for size in sizes[kind]]
        # The largest first: the others find memory in its pool.
        for size, kind in sorted(steps, key=lambda step: step[0], reverse=True):
            if not self._sizes.on_use or size == sizes[kind][-1]:
                graphs.graph(kind, size)
        return graphs

    def _graph(self, kind: StepKind, size: int) -> StepGraph:
        buffers = self._buffers(size, kind)
        return StepGraph(buffers, self._record(buffers.bind(self._forward)), self._device)

    def largest(self) -> Callable[[], Tensor]:
        """What takes as much memory as any of the steps when it is recorded, and computes nothing.

        For it may be called before there is any graph, to be measured.
        """
        size, kind = max(
            ((size, kind) for kind in self._kinds() for size in self._sizes_of(kind)),
            key=lambda step: (step[0], step[1].has_adapters, not step[1].is_decode),
        )
        return self._buffers(size, kind).bind(self._forward)

    def _kinds(self) -> list[StepKind]:
        return [
            StepKind(is_decode, has_adapters)
            for is_decode, has_adapters in product((True, False), (False, True))
            if self._with_lora or not has_adapters
        ]

    def _sizes_of(self, kind: StepKind) -> tuple[int, ...]:
        return self._sizes.decode if kind.is_decode else self._sizes.mixed

    def _buffers(self, size: int, kind: StepKind) -> GraphBuffers:
        return GraphBuffers(
            self._device,
            self._plans,
            size,
            kind,
            self._max_blocks,
            self._block_size,
            self._group_of,
        )


class StepGraphs:
    """The recorded steps of one model."""

    def __init__(
        self,
        sizes: Mapping[StepKind, Sequence[int]],
        record: Callable[[StepKind, int], StepGraph],
    ) -> None:
        """sizes: of each kind, ascending. record: makes one graph, when it is first needed."""
        self._sizes = sizes
        self._record = record
        self._graphs: dict[tuple[StepKind, int], StepGraph] = {}

    def graph(self, kind: StepKind, size: int) -> StepGraph:
        found = self._graphs.get((kind, size))
        if found is None:
            found = self._graphs[kind, size] = self._record(kind, size)
        return found

    def recorded(self) -> Set[tuple[StepKind, int]]:
        """The kinds and sizes that are there by now."""
        return self._graphs.keys()

    def run(self, rows: BatchRows, pending: PendingTokens | None = None) -> Tensor | None:
        """The hidden states (N, H) asked for, until the next call; None for a step to run eagerly.

        That is one of more rows than any graph, or of rows that graphs know nothing of.
        """
        if rows.is_embeds is not None or rows.embedding_changes or rows.biases or rows.experts:
            return None
        kind = StepKind(rows.is_decode, bool(rows.segments))
        sizes = self._sizes.get(kind, ())
        index = bisect.bisect_left(sizes, rows.num_rows)
        if index == len(sizes):
            return None
        return self.graph(kind, sizes[index]).run(rows, pending)


class GraphBuffers:
    """All that a recorded step of `size` rows reads besides weights, adapters and KV."""

    def __init__(
        self,
        device: Device,
        plans: StepPlans,
        size: int,
        kind: StepKind,
        max_blocks: int,
        block_size: int,
        group_of: Sequence[int],
    ) -> None:
        self.size = size
        self._device = device
        self._plans = plans
        self._group_of = group_of
        self._num_groups = max(group_of) + 1
        self._columns = device.upload(torch.from_numpy(self._padding())).clone()
        self._attention = [
            plans.new_attention_plan(size, max_blocks, block_size, kind.is_decode)
            for _ in range(self._num_groups)
        ]
        self._lora = plans.new_lora_plan(size) if kind.has_adapters else None

    def bind(self, forward: Forward) -> Callable[[], Tensor]:
        """`forward` of what the buffers hold when it is called."""
        input_ids, positions, *slots = self._columns
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=by_layer(slots, self._group_of),
            attention=by_layer(self._attention, self._group_of),
            lora=self._lora,
        )
        return lambda: forward(batch)

    def fill(self, rows: BatchRows, pending: PendingTokens | None = None) -> None:
        """Put in the next replay's rows. What earlier ones read stays: they may not have run."""
        columns = rows.columns
        if rows.num_rows < self.size:
            columns = self._padding()
            columns[:, : rows.num_rows] = rows.columns
        self._device.fill(self._columns, columns)
        if pending is not None:
            pending.put_into(self._columns[0])
        starts = np.array(rows.query_start_loc, np.int32)
        for plan, block_tables in zip(self._attention, rows.block_tables, strict=True):
            self._plans.fill_attention_plan(plan, starts, rows.seq_lens, block_tables)
        if self._lora is not None:
            self._plans.fill_lora_plan(self._lora, rows.segments)

    def _padding(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """(2 + groups, size): input_ids, positions and slot_mappings of rows without a request."""
        columns = np.zeros((2 + self._num_groups, self.size), np.int64)
        columns[2:] = _PADDING_SLOT
        return columns


class StepGraph:
    def __init__(self, buffers: GraphBuffers, work: RecordedWork, device: Device) -> None:
        self.size = buffers.size
        self._buffers = buffers
        self._work = work
        self._device = device

    def run(self, rows: BatchRows, pending: PendingTokens | None = None) -> Tensor:
        """Run the step, as `StepGraphs.run` says."""
        self._buffers.fill(rows, pending)
        self._work.replay()
        output = self._work.output
        if rows.outputs is not None:
            return output.index_select(0, self._device.upload(torch.from_numpy(rows.outputs.rows)))
        return output if rows.num_rows == self.size else output[: rows.num_rows]
