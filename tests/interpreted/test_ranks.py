"""Ranks with the kernels of GPUs: the bits of one rank, recorded steps and adapters included.

The ranks are threads whose parts are put together on the host; what cards put together by NCCL is
in tests/distributed and tests/worker/test_rank_cards.py, and on cards tests/gpu/test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import CacheConfig, LoRAConfig, ModelConfig
from lora_serve.distributed.group import ALONE, Group
from lora_serve.distributed.in_process import InProcessGroup
from lora_serve.distributed.shares import HeadChannels, RankPlace
from lora_serve.engine.core.executor import Executor
from lora_serve.identity import BASE_MODEL, AdapterRef
from lora_serve.models.source import load_spec
from lora_serve.step import ModelRunnerOutput, SchedulerOutput
from lora_serve.worker import rank_executor, rank_shares, runners
from lora_serve.worker.batch_builder import BatchRows
from lora_serve.worker.step_graphs import GraphSizes, StepGraphs
from lora_serve.worker.worker import Worker
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.rank_lives import DRAWN, GREEDY, chunk, prompt_of
from tests.fakes.ranks import start_threads
from tests.fakes.tiny_models import ALL_MODELS, EXPERTS_ONE_LAYER, ONE_LAYER, save

# (tokens known, tokens of the first chunk, what its samples are) of each request.
REQUESTS = [(20, 12, GREEDY), (5, 5, DRAWN), (3, 3, GREEDY)]
NUM_STEPS = 3  # both chunks of the first, and a step of decodes alone


@pytest.fixture(scope="module")
def adapters(model_path: Path, adapter_paths: list[Path]) -> list[AdapterCheckpoint]:
    """One on all linear layers of rank 13, and one of rank 4."""
    spec = load_spec(model_path)
    return [
        read_saved(make_peft(ONE_LAYER, seed, r=rank), path / "again", spec)
        for seed, (path, rank) in enumerate(zip(adapter_paths, (4, 13), strict=True))
    ]


def executor(model: Path, world_size: int, **settings: Any) -> Executor:

    def make(group: Group) -> Worker:
        return Worker(
            ModelConfig(
                model=str(model),
                override_op=("all=triton",),
                batch_invariant=True,
                cpu_threads=1,
                max_model_len=32,
                **{"dtype": "bfloat16", **settings},
            ),
            CacheConfig(num_gpu_blocks_override=16),
            LoRAConfig(enable_lora=True, max_loras=2),
            max_num_seqs=3,
            max_num_batched_tokens=32,
            group=group,
        )

    return make(ALONE) if world_size == 1 else start_threads(world_size, make)


def life(
    executor: Executor, adapters: list[AdapterCheckpoint], num_steps: int = NUM_STEPS
) -> list[ModelRunnerOutput]:
    """All that comes out of requests under two adapters and none, and KV at the end."""
    executor.load()
    for adapter in adapters:
        executor.prepare_adapter(adapter)
    add = tuple(adapter.digest for adapter in adapters)
    owners = [*(AdapterRef("a", digest) for digest in add), *[BASE_MODEL] * 3]
    tokens = [prompt_of(index, length) for index, (length, _, _) in enumerate(REQUESTS)]
    starts, ends = [0] * len(tokens), [first for _, first, _ in REQUESTS]
    outputs = []
    for step_id in range(num_steps):
        requests = tuple(
            chunk(
                index,
                known[start:end],
                start,
                owners[index],
                REQUESTS[index][2] if end == len(known) else None,
                num_groups=1,
            )
            for index, (known, start, end) in enumerate(zip(tokens, starts, ends, strict=True))
        )
        saves = (0,) if step_id == NUM_STEPS - 1 else ()
        executor.submit(SchedulerOutput(step_id, requests, (), add, saves))
        outputs.append(executor.collect())
        for known, result in zip(tokens, outputs[-1].requests, strict=True):
            known += result.token_ids
        starts, ends, add = ends, [len(known) for known in tokens], ()
    executor.close()
    return outputs


@pytest.fixture(scope="module")
def expected(model_path: Path, adapters: list[AdapterCheckpoint]) -> list[ModelRunnerOutput]:
    """What one rank gives, without recorded steps."""
    return life(executor(model_path, 1, enforce_eager=True), adapters)


def test_two_ranks_with_recorded_steps_give_the_bits_of_one(
    model_path: Path,
    adapters: list[AdapterCheckpoint],
    expected: list[ModelRunnerOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decodes are replayed, of four rows each, of which one is padding."""
    monkeypatch.setattr(runners, "graph_sizes", lambda *_: GraphSizes(decode=(4,)))
    ran: list[int] = []
    run = StepGraphs.run

    def noted(graphs: StepGraphs, rows: BatchRows, *pending: Any) -> Tensor | None:
        hidden = run(graphs, rows, *pending)
        if hidden is not None:
            ran.append(rows.num_rows)
        return hidden

    monkeypatch.setattr(StepGraphs, "run", noted)
    assert len({result.token_ids for result in expected[-1].requests}) > 1
    assert life(executor(model_path, 2), adapters) == expected
    assert ran == [len(REQUESTS)] * 2, "one step of each rank"


def test_four_ranks_that_share_kv_heads_give_the_bits_of_one(
    model_path: Path, adapters: list[AdapterCheckpoint], expected: list[ModelRunnerOutput]
) -> None:
    found = life(executor(model_path, 4, enforce_eager=True), adapters, num_steps=2)
    assert found == expected[:2]


def test_two_ranks_divide_codes(model_path: Path, adapters: list[AdapterCheckpoint]) -> None:
    settings: dict[str, Any] = {"enforce_eager": True, "quantization": "int8"}
    whole, divided = (executor(model_path, size, **settings) for size in (1, 2))
    assert life(divided, adapters, num_steps=1) == life(whole, adapters, num_steps=1)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[AdapterCheckpoint]]:
    """A mixture, and adapters of two ranks on its experts and all else."""
    root = tmp_path_factory.mktemp("experts")
    model = save(ALL_MODELS[EXPERTS_ONE_LAYER].make(), root / "model")
    spec = load_spec(model)
    changed = ["experts.gate_up_proj", "experts.down_proj"]
    return model, [
        read_saved(
            make_peft(EXPERTS_ONE_LAYER, seed, r=rank, target_parameters=changed),
            root / str(rank),
            spec,
        )
        for seed, rank in enumerate((4, 13))
    ]


@pytest.fixture(scope="module")
def expected_of_experts(
    experts: tuple[Path, list[AdapterCheckpoint]],
) -> list[ModelRunnerOutput]:
    model, adapters = experts
    return life(executor(model, 1, enforce_eager=True), adapters, num_steps=1)


def test_two_ranks_divide_what_adapters_add_to_experts(
    experts: tuple[Path, list[AdapterCheckpoint]], expected_of_experts: list[ModelRunnerOutput]
) -> None:
    """A rank adds to its own outputs of each expert, of the pairs that all ranks chose alike."""
    model, adapters = experts
    found = life(executor(model, 2, enforce_eager=True), adapters, num_steps=1)
    assert found == expected_of_experts


# ── faults put in on purpose: each must show in what comes out ──────────────────────────────────


def test_parts_in_another_order_would_show(
    model_path: Path,
    adapters: list[AdapterCheckpoint],
    expected: list[ModelRunnerOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gather = InProcessGroup.gather

    def swapped(
        group: InProcessGroup, part: Any, widths: list[int], whole: Any, **how: Any
    ) -> None:
        gather(group, part, widths, whole, **how)
        if len(set(widths)) == 1 and whole.shape[1] > 8:
            whole.copy_(whole.roll(widths[0], dims=1))

    monkeypatch.setattr(InProcessGroup, "gather", swapped)
    found = life(executor(model_path, 2, enforce_eager=True), adapters, num_steps=1)
    assert found != expected[:1]


def test_a_rank_with_the_kv_heads_of_another_would_show(
    model_path: Path,
    adapters: list[AdapterCheckpoint],
    expected: list[ModelRunnerOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share = HeadChannels.share

    def of_the_first(channels: HeadChannels, place: RankPlace) -> range:
        return share(channels, RankPlace(0, place.world_size) if channels.are_kv else place)

    monkeypatch.setattr(HeadChannels, "share", of_the_first)
    found = life(executor(model_path, 2, enforce_eager=True), adapters, num_steps=1)
    assert found != expected[:1]


def test_a_rank_with_the_experts_outputs_of_another_would_show(
    experts: tuple[Path, list[AdapterCheckpoint]],
    expected_of_experts: list[ModelRunnerOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What adapters change elsewhere is each rank's own."""
    model, adapters = experts
    own_rows = rank_shares._own_rows

    def of_the_first(b: Any, rows: Sequence[range]) -> Any:
        return own_rows(b, [range(len(share)) for share in rows])

    def with_wrong_ones(checkpoint: AdapterCheckpoint, *how: Any) -> AdapterCheckpoint:
        right = share_of(checkpoint, *how)
        with monkeypatch.context() as patch:
            patch.setattr(rank_shares, "_own_rows", of_the_first)
            wrong = share_of(checkpoint, *how)
        modules = tuple(
            bad if ".experts." in good.name else good
            for good, bad in zip(right.modules, wrong.modules, strict=True)
        )
        return replace(right, modules=modules)

    share_of = rank_executor.adapter_share
    monkeypatch.setattr(rank_executor, "adapter_share", with_wrong_ones)
    found = life(executor(model, 2, enforce_eager=True), adapters, num_steps=1)
    assert found != expected_of_experts
