"""Decode steps recorded once and replayed: the same work without a launch for each kernel.

The one rule: what a recorded step reads lies in buffers that it owns, at addresses that never
change; a step is run by filling them and replaying. A step of n requests takes the smallest graph
of at least n rows; the others are padding, which no kernel reads KV for or writes it from. What
is recorded is exactly the decoder's forward, so a graph and an eager step run the same kernels.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lora_serve.layers.batch import ForwardBatch
from lora_serve.ops import GraphPlans, RecordedWork
from lora_serve.worker.batch_builder import AwaitedTokens, BatchRows
from lora_serve.worker.device import Device

_PADDING_SLOT = -1
_MOST_ROWS = 512
_MOST_EXACT_ROWS = 64

Forward = Callable[[ForwardBatch], Tensor]


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the graphs to record: close where a row counts, and never twice what is needed."""
    sizes = [1, 2, 4, 8, 16, 24, *range(32, _MOST_ROWS + 1, 32)]
    most = min(max_num_seqs, _MOST_ROWS)
    return (*(size for size in sizes if size < most), most)


def exact_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The same where recording costs little and a row of padding costs as much as any other.

    Beyond them a step's kernels take so long that what is between them does not count.
    """
    return tuple(range(1, min(max_num_seqs, _MOST_EXACT_ROWS) + 1))


class DecodeGraphs:
    """All recorded steps of one model; `run` is right for steps that `can_run` agrees to."""

    def __init__(self, graphs: Sequence[DecodeGraph], lora_graphs: Sequence[DecodeGraph]) -> None:
        """graphs: by ascending size, without adapters; lora_graphs: with, or empty."""
        self._graphs = graphs
        self._lora_graphs = lora_graphs

    @classmethod
    def record(
        cls,
        device: Device,
        plans: GraphPlans,
        forward: Forward,
        sizes: Sequence[int],
        max_blocks: int,
        block_size: int,
        with_lora: bool,
    ) -> DecodeGraphs:
        """Record steps of all `sizes`, ascending. max_blocks: blocks of the longest request."""
        record = plans.record or device.record
        families = []
        for has_adapters in (False, True) if with_lora else (False,):
            family: list[DecodeGraph] = []
            for size in reversed(sizes):  # the largest first: the others find memory in its pool
                buffers = GraphBuffers(device, plans, size, max_blocks, block_size, has_adapters)
                work = record(buffers.bind(forward))
                family.insert(0, DecodeGraph(buffers, work))
            families.append(family)
        return cls(families[0], families[1] if with_lora else ())

    def can_run(self, rows: BatchRows) -> bool:
        return rows.is_decode and self._find(rows) is not None

    def run(self, rows: BatchRows, awaited: AwaitedTokens | None = None) -> Tensor:
        """The hidden states (n, H) of n rows, until the next call."""
        graph = self._find(rows)
        assert graph is not None, f"no graph for {rows.num_rows} rows"
        return graph.run(rows, awaited)

    def _find(self, rows: BatchRows) -> DecodeGraph | None:
        graphs = self._lora_graphs if rows.segments else self._graphs
        index = bisect.bisect_left(graphs, rows.num_rows, key=lambda graph: graph.size)
        return graphs[index] if index < len(graphs) else None


class GraphBuffers:
    """All that a recorded step of `size` rows reads besides weights, adapters and KV."""

    def __init__(
        self,
        device: Device,
        plans: GraphPlans,
        size: int,
        max_blocks: int,
        block_size: int,
        has_adapters: bool,
    ) -> None:
        self.size = size
        self._device = device
        self._plans = plans
        self._columns = device.upload(torch.from_numpy(_padding(size))).clone()
        self._attention = plans.new_attention_plan(size, max_blocks, block_size)
        self._lora = plans.new_lora_plan(size) if has_adapters else None

    def bind(self, forward: Forward) -> Callable[[], Tensor]:
        """`forward` of what the buffers hold when it is called."""
        input_ids, positions, slot_mapping = self._columns
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            attention=self._attention,
            lora=self._lora,
        )
        return lambda: forward(batch)

    def fill(self, rows: BatchRows, awaited: AwaitedTokens | None = None) -> None:
        """For the next replay. Replays before may not have run: what they read is never changed."""
        columns = _padding(self.size)
        columns[:, : rows.num_rows] = rows.input_ids, rows.positions, rows.slot_mapping
        self._device.fill(self._columns, torch.from_numpy(columns))
        if awaited is not None:
            awaited.put_into(self._columns[0])
        self._plans.fill_attention_plan(self._attention, rows.seq_lens, rows.block_tables)
        if self._lora is not None:
            self._plans.fill_lora_plan(self._lora, rows.segments)


class DecodeGraph:
    def __init__(self, buffers: GraphBuffers, work: RecordedWork) -> None:
        self.size = buffers.size
        self._buffers = buffers
        self._work = work

    def run(self, rows: BatchRows, awaited: AwaitedTokens | None = None) -> Tensor:
        self._buffers.fill(rows, awaited)
        self._work.replay()
        return self._work.output[: rows.num_rows]


def _padding(size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """(3, size): input_ids, positions and slot_mapping of rows that belong to nobody."""
    columns = np.zeros((3, size), np.int64)
    columns[2] = _PADDING_SLOT
    return columns
