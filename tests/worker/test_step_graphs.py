"""Recorded steps against eager ones: every bit of hidden states and KV must be equal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.ops.contract import Ops
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import available_ops
from lora_serve.prompts import PlacedRows
from lora_serve.step import ScheduledRequest
from lora_serve.worker.batch_rows import BatchRows, PendingTokens
from lora_serve.worker.step_graphs import (
    GraphBuffers,
    GraphSizes,
    StepGraph,
    StepGraphs,
    StepKind,
    StepRecorder,
    exact_sizes,
    graph_sizes,
)
from tests.fakes.asked import sampling, scoring
from tests.fakes.bare_model import BLOCK_SIZE, SAMPLE, BareModel, Prompt
from tests.fakes.device import RecordingDevice
from tests.fakes.graph_ops import RecordableOps
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import VOCAB_SIZE

SIZES = GraphSizes((1, 2, 4), (8, 24))
MAX_BLOCKS = 8

RECORDABLE = {"reference": RecordableOps(REFERENCE).ops()}
RECORDABLE |= {name: ops for name, ops in available_ops().items() if ops.graph_plans is not None}
BACKENDS = pytest.mark.parametrize("ops", RECORDABLE.values(), ids=RECORDABLE)
MODELS = pytest.mark.parametrize(
    ("model", "with_lora"),
    [("qwen2", False), ("qwen2", True), ("qwen3", False), ("gemma2", True), ("gemma3", False)],
    ids=["base", "adapters", "normed heads", "gemma 2, adapters", "gemma 3"],
)


class Recorded:
    """A model with recorded steps beside its eager ones, and requests that have run for a while."""

    def __init__(
        self,
        directory: Path,
        adapters: Path,
        ops: Ops,
        *,
        with_lora: bool,
        family: str = "qwen2",
    ) -> None:
        self.model = BareModel(directory, ops, torch.float32)
        self.device = RecordingDevice()
        self.adapters: list[AdapterRef | NoAdapter] = [BASE_MODEL]
        for seed, rank in ((1, 8), (2, 13)) if with_lora else ():
            peft = make_peft(family, seed, r=rank)
            checkpoint = read_saved(peft, adapters / str(seed), self.model.spec)
            self.adapters.append(self.model.add_adapter(checkpoint))
        assert ops.graph_plans is not None
        self.plans = ops.graph_plans
        self.records_itself = ops.record is not None
        self.forward = partial(self.model.model.forward, kv_caches=self.model.kv_caches)
        with torch.inference_mode():
            self.recorder = StepRecorder(
                self.device,
                self.plans,
                self.forward,
                GraphSizes(SIZES.decode, SIZES.mixed, on_use=self.records_itself),
                record=ops.record or self.device.record,
                max_blocks=MAX_BLOCKS,
                block_size=BLOCK_SIZE,
                group_of=[0] * len(self.model.kv_caches),
                with_lora=with_lora,
            )
            self.graphs = self.recorder.record()

    def requests(self, num_rows: Sequence[int], rng: random.Random) -> list[ScheduledRequest]:
        """The last so many rows of requests whose earlier KV is in the cache."""
        chunks, before = [], []
        for index, count in enumerate(num_rows):
            length = rng.randrange(count, 60)
            tokens = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
            blocks = range(MAX_BLOCKS * index, MAX_BLOCKS * (index + 1))
            prompt = Prompt(tokens, blocks, rng.choice(self.adapters))
            if length > count:
                before.append(prompt.chunk(0, length - count))
            chunks.append(prompt.chunk(length - count, length))
        if before:
            self.model.step(before)
        return chunks

    def rows(self, requests: Sequence[ScheduledRequest]) -> BatchRows:
        return self.model.builder.lay_out(requests, self.model.adapters.__getitem__)

    def kv(self) -> Tensor:
        """The cache as bytes: unwritten blocks are NaN, and must stay the NaN they are."""
        return torch.cat([cache.view(torch.uint8).flatten() for cache in self.model.kv_caches])

    def eager(self, rows: BatchRows) -> Tensor:
        return self.forward(self.model.builder.to_device(rows))

    def assert_exact(self, requests: Sequence[ScheduledRequest]) -> None:
        """Hidden states and KV of a recorded step, and of an eager one over the same KV."""
        rows, before = self.rows(requests), self.kv()
        hidden = self.graphs.run(rows)
        assert hidden is not None
        hidden = hidden.clone()
        replayed_kv = self.kv()
        caches = self.model.kv_caches
        for cache, old in zip(caches, before.chunk(len(caches)), strict=True):
            cache.view(torch.uint8).flatten().copy_(old)
        assert torch.equal(hidden, self.eager(rows))
        assert torch.equal(replayed_kv, self.kv())


@BACKENDS
@MODELS
@torch.inference_mode()
def test_a_recorded_decode_is_the_eager_one_bit_for_bit(
    directories: dict[str, Path], tmp_path: Path, ops: Ops, model: str, with_lora: bool
) -> None:
    recorded = Recorded(directories[model], tmp_path, ops, with_lora=with_lora, family=model)
    rng = random.Random(5)
    for count in (3, 1, 4, 2, 3, 1):
        recorded.model.poison()
        recorded.assert_exact(recorded.requests([1] * count, rng))
    if not recorded.records_itself:
        assert recorded.device.num_replays == 6


@BACKENDS
@MODELS
@torch.inference_mode()
def test_a_recorded_step_with_prompts_is_the_eager_one_bit_for_bit(
    directories: dict[str, Path], tmp_path: Path, ops: Ops, model: str, with_lora: bool
) -> None:
    """Whichever rows are asked for: none, a request's last, all."""
    recorded = Recorded(directories[model], tmp_path, ops, with_lora=with_lora, family=model)
    rng = random.Random(6)
    for num_rows in ([2], [1, 5, 1], [17, 1, 6], [3, 3], [24], [1, 7]):
        recorded.model.poison()
        recorded.assert_exact([asking(r, rng) for r in recorded.requests(num_rows, rng)])
    if not recorded.records_itself:
        assert recorded.device.num_replays == 6


def asking(request: ScheduledRequest, rng: random.Random) -> ScheduledRequest:
    if rng.random() < 0.3:
        return replace(request, asked=scoring(request.token_ids))
    return replace(request, asked=sampling(SAMPLE)) if rng.random() < 0.7 else request


@torch.inference_mode()
def test_steps_that_were_not_recorded_are_left_to_the_eager_way(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    recorded = Recorded(directories["qwen2"], tmp_path, RECORDABLE["reference"], with_lora=False)
    decode = recorded.requests([1] * 4, random.Random(1))
    assert is_recorded(recorded, recorded.rows(decode))
    one_more = Prompt([1], range(60, 61)).chunk(0, 1)
    assert not is_recorded(recorded, recorded.rows([*decode, one_more]))
    prompt = Prompt(range(25), range(60, 62))
    assert is_recorded(recorded, recorded.rows([prompt.chunk(0, 24)]))
    assert not is_recorded(recorded, recorded.rows([prompt.chunk(0, 25)]))
    data = torch.zeros(2, recorded.model.spec.hidden_size).numpy().tobytes()
    embeds = PlacedRows(((0, 2),), data)
    assert not is_recorded(recorded, recorded.rows([replace(prompt.chunk(0, 2), embeds=embeds)]))


@torch.inference_mode()
def test_steps_recorded_on_use_are_recorded_once_and_by_the_first_that_takes_them(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    model = Recorded(directories["qwen2"], tmp_path, RECORDABLE["reference"], with_lora=False)
    recorded: list[int] = []
    sizes = {StepKind(is_decode=True, has_adapters=False): SIZES.decode}

    def record(kind: StepKind, size: int) -> StepGraph:
        recorded.append(size)
        return model.recorder._graph(kind, size)

    graphs = StepGraphs(sizes, record)
    for count in (2, 1, 2, 3, 4):
        rows = model.rows(model.requests([1] * count, random.Random(3)))
        assert torch.equal(graphs.run(rows), model.eager(rows))
    assert recorded == [2, 1, 4]


@pytest.mark.skipif("cpu" not in RECORDABLE, reason="needs the native kernels")
def test_a_start_records_the_largest_step_of_each_kind_alone(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    recorded = Recorded(directories["qwen2"], tmp_path, RECORDABLE["cpu"], with_lora=True)
    assert recorded.graphs.recorded() == {
        (StepKind(is_decode=is_decode, has_adapters=has_adapters), sizes[-1])
        for is_decode, sizes in ((True, SIZES.decode), (False, SIZES.mixed))
        for has_adapters in (False, True)
    }


@torch.inference_mode()
def test_adapters_need_steps_recorded_with_them(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    recorded, without = (
        Recorded(
            directories["qwen2"], tmp_path / str(lora), RECORDABLE["reference"], with_lora=lora
        )
        for lora in (True, False)
    )
    prompt = Prompt([1, 2], range(1), recorded.adapters[1])
    for rows in (recorded.rows([prompt.chunk(0, 2)]), recorded.rows([prompt.chunk(0, 1)])):
        assert is_recorded(recorded, rows)
        assert not is_recorded(without, rows)


def is_recorded(recorded: Recorded, rows: BatchRows) -> bool:
    return recorded.graphs.run(rows) is not None


class NewBuffersEachStep(GraphBuffers):
    """A mutant: it gives the step tensors of its own, where recorded work does not look."""

    def fill(self, rows: BatchRows, pending: PendingTokens | None = None) -> None:
        self._columns = self._columns.clone()
        super().fill(rows, pending)


@torch.inference_mode()
def test_a_step_filled_into_other_buffers_is_caught(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    recorded = Recorded(directories["qwen2"], tmp_path, RECORDABLE["reference"], with_lora=False)
    device, plans = recorded.device, recorded.plans
    rows = recorded.rows(recorded.requests([1, 1], random.Random(2)))
    expected = recorded.eager(rows)
    results = []
    for buffers_class in (GraphBuffers, NewBuffersEachStep):
        kind, group_of = (
            StepKind(is_decode=True, has_adapters=False),
            [0] * len(recorded.model.kv_caches),
        )
        buffers = buffers_class(device, plans, 2, kind, MAX_BLOCKS, BLOCK_SIZE, group_of)
        graph = StepGraph(buffers, device.record(buffers.bind(recorded.forward)), device)
        results.append(torch.equal(graph.run(rows), expected))
    assert results == [True, False]


@pytest.mark.parametrize(
    ("num_seqs", "sizes"),
    [(1, (1,)), (5, (1, 2, 4, 5)), (16, (1, 2, 4, 8, 16)), (40, (1, 2, 4, 8, 16, 24, 32, 40))],
)
def test_sizes_end_at_the_largest_number_of_requests(num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(num_seqs, 100, 512) == GraphSizes(sizes, (16, 32, 64, 100))


def test_sizes_end_at_the_most_rows_that_are_recorded() -> None:
    assert graph_sizes(256, 8192, 40) == GraphSizes((1, 2, 4, 8, 16, 24, 32, 40), (16, 32, 40))
    assert exact_sizes(256, 3) == GraphSizes((1, 2, 3), on_use=True)
    assert exact_sizes(2, 64, 4) == GraphSizes((1, 2), (2, 3, 4), on_use=True)


def test_no_step_is_padded_to_more_than_twice_its_rows_nor_by_more_than_a_block_of_rows() -> None:
    sizes = graph_sizes(10_000, 10_000, 512)
    for rows in range(1, 513):
        decode, mixed = (
            next(size for size in each if size >= rows) for each in (sizes.decode, sizes.mixed)
        )
        assert decode < 2 * rows
        assert decode - rows < 32
        assert mixed < max(2 * rows, 17)
        assert mixed - rows < 64


@pytest.mark.parametrize("with_lora", [False, True])
@torch.inference_mode()
def test_the_largest_step_can_be_run_before_there_is_any_graph(
    directories: dict[str, Path], tmp_path: Path, with_lora: bool
) -> None:
    """It writes no KV, and gives as many rows as the largest graph."""
    recorded = Recorded(
        directories["qwen2"], tmp_path, RECORDABLE["reference"], with_lora=with_lora
    )
    before = recorded.kv()
    assert len(recorded.recorder.largest()()) == 24
    assert torch.equal(recorded.kv(), before)
