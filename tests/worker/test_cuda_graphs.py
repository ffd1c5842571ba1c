"""Recorded decode steps against eager ones: every bit of hidden states and KV must be equal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_serve.identity import AdapterRef
from lora_serve.ops import Ops
from lora_serve.ops.backends import available_ops
from lora_serve.ops.reference import REFERENCE
from lora_serve.step import ScheduledRequest
from lora_serve.worker.batch_builder import AwaitedTokens, BatchRows
from lora_serve.worker.cuda_graphs import DecodeGraph, DecodeGraphs, GraphBuffers, graph_sizes
from tests.fakes.bare_model import BLOCK_SIZE, BareModel, Prompt
from tests.fakes.device import RecordingDevice
from tests.fakes.graph_ops import RecordableOps
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import VOCAB_SIZE

SIZES = (1, 2, 4)
MAX_BLOCKS = 8

RECORDABLE = {"reference": RecordableOps(REFERENCE).ops()}
RECORDABLE |= {name: ops for name, ops in available_ops().items() if ops.graph_plans is not None}
BACKENDS = pytest.mark.parametrize("ops", RECORDABLE.values(), ids=RECORDABLE)


class Recorded:
    """A model with recorded steps beside its eager ones, and requests that have run for a while."""

    def __init__(self, directory: Path, adapters: Path, ops: Ops, *, with_lora: bool) -> None:
        self.model = BareModel(directory, ops, torch.float32)
        self.device = RecordingDevice()
        self.adapters: list[AdapterRef | None] = [None]
        for seed, rank in ((1, 8), (2, 13)) if with_lora else ():
            peft = make_peft("qwen2", seed, r=rank)
            checkpoint = read_saved(peft, adapters / str(seed), self.model.spec)
            self.adapters.append(self.model.add_adapter(checkpoint))
        assert ops.graph_plans is not None
        self.plans = ops.graph_plans
        self.forward = partial(self.model.decoder.forward, kv_caches=self.model.kv_caches)
        with torch.inference_mode():
            self.graphs = DecodeGraphs.record(
                self.device,
                self.plans,
                self.forward,
                SIZES,
                max_blocks=MAX_BLOCKS,
                block_size=BLOCK_SIZE,
                with_lora=with_lora,
            )

    def requests(self, count: int, rng: random.Random) -> list[ScheduledRequest]:
        """Decode steps of requests whose earlier KV is in the cache."""
        prompts = []
        for index in range(count):
            length = rng.randrange(1, 60)
            tokens = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
            blocks = range(MAX_BLOCKS * index, MAX_BLOCKS * (index + 1))
            prompts.append(Prompt(tokens, blocks, rng.choice(self.adapters)))
        before = [p.chunk(0, len(p.token_ids) - 1) for p in prompts if len(p.token_ids) > 1]
        if before:
            self.model.step(before)
        return [p.chunk(len(p.token_ids) - 1, len(p.token_ids)) for p in prompts]

    def rows(self, requests: Sequence[ScheduledRequest]) -> BatchRows:
        return self.model.builder.lay_out(requests, self.model.adapters.__getitem__)

    def kv(self) -> Tensor:
        """As bytes: blocks that nobody wrote are NaN, and must stay the NaN they are."""
        return torch.cat([cache.view(torch.uint8).flatten() for cache in self.model.kv_caches])

    def eager(self, rows: BatchRows) -> Tensor:
        return self.forward(self.model.builder.to_device(rows))


@BACKENDS
@pytest.mark.parametrize(
    ("model", "with_lora"),
    [("qwen2", False), ("qwen2", True), ("qwen3", False)],
    ids=["base", "adapters", "normed heads"],
)
@torch.inference_mode()
def test_a_recorded_step_is_the_eager_one_bit_for_bit(
    directories: dict[str, Path], tmp_path: Path, ops: Ops, model: str, with_lora: bool
) -> None:
    recorded = Recorded(directories[model], tmp_path, ops, with_lora=with_lora)
    rng = random.Random(5)
    for count in (3, 1, 4, 2, 3, 1):
        recorded.model.poison()
        rows = recorded.rows(recorded.requests(count, rng))
        before = recorded.kv()
        assert recorded.graphs.can_run(rows)
        hidden = recorded.graphs.run(rows).clone()
        replayed_kv = recorded.kv()
        for cache, old in zip(
            recorded.model.kv_caches, before.chunk(len(recorded.model.kv_caches)), strict=True
        ):
            cache.view(torch.uint8).flatten().copy_(old)
        assert torch.equal(hidden, recorded.eager(rows))
        assert torch.equal(replayed_kv, recorded.kv())
    if ops.graph_plans is None or ops.graph_plans.record is None:
        assert recorded.device.num_replays == 6


@torch.inference_mode()
def test_steps_that_were_not_recorded_are_left_to_the_eager_way(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    recorded = Recorded(directories["qwen2"], tmp_path, RECORDABLE["reference"], with_lora=False)
    decode = recorded.requests(4, random.Random(1))
    assert recorded.graphs.can_run(recorded.rows(decode))
    prefill = Prompt(range(2), range(60, 61)).chunk(0, 2)
    assert not recorded.graphs.can_run(recorded.rows([*decode[:2], prefill]))
    assert not recorded.graphs.can_run(
        recorded.rows([*decode, Prompt([1], range(60, 61)).chunk(0, 1)])
    )


def test_adapters_need_steps_recorded_with_them(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    recorded = Recorded(directories["qwen2"], tmp_path, RECORDABLE["reference"], with_lora=True)
    without = DecodeGraphs(recorded.graphs._graphs, ())
    adapter = recorded.adapters[1]
    rows = recorded.rows([Prompt([1], range(1), adapter).chunk(0, 1)])
    assert recorded.graphs.can_run(rows)
    assert not without.can_run(rows)


class NewBuffersEachStep(GraphBuffers):
    """A mutant: it gives the step tensors of its own, where recorded work does not look."""

    def fill(self, rows: BatchRows, awaited: AwaitedTokens | None = None) -> None:
        self._columns = self._columns.clone()
        super().fill(rows, awaited)


@torch.inference_mode()
def test_a_step_filled_into_other_buffers_is_caught(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    recorded = Recorded(directories["qwen2"], tmp_path, RECORDABLE["reference"], with_lora=False)
    rows = recorded.rows(recorded.requests(2, random.Random(2)))
    expected = recorded.eager(rows)
    results = []
    for kind in (GraphBuffers, NewBuffersEachStep):
        buffers = kind(recorded.device, recorded.plans, 2, MAX_BLOCKS, BLOCK_SIZE, False)
        graph = DecodeGraph(buffers, recorded.device.record(buffers.bind(recorded.forward)))
        results.append(torch.equal(graph.run(rows), expected))
    assert results == [True, False]


@pytest.mark.parametrize(
    ("seats", "sizes"),
    [(1, (1,)), (5, (1, 2, 4, 5)), (16, (1, 2, 4, 8, 16)), (40, (1, 2, 4, 8, 16, 24, 32, 40))],
)
def test_sizes_end_at_the_number_of_seats(seats: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(seats) == sizes


def test_no_step_is_padded_to_more_than_twice_its_rows_nor_by_more_than_31() -> None:
    sizes = graph_sizes(10_000)
    for rows in range(1, sizes[-1] + 1):
        chosen = next(size for size in sizes if size >= rows)
        assert chosen < 2 * rows
        assert chosen - rows < 32
