"""Ranks with a card each: the bits of one card. Without a second card only what is refused."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from lora_serve.engine.core.executor import make_executor
from lora_serve.errors import ConfigError, RankLostError
from lora_serve.identity import BASE_MODEL
from lora_serve.llm import LLM
from lora_serve.models.source import load_spec
from lora_serve.step import ModelRunnerOutput, SchedulerOutput
from tests.e2e.processes import pids_below
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.rank_lives import GREEDY, chunk, life
from tests.fakes.tiny_models import ALL_MODELS, FOUR_KV_HEADS, save

pytestmark = pytest.mark.gpu

WORLD_SIZES = (2, 4)
SETTINGS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float16", "enforce_eager": True},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ALL_MODELS[FOUR_KV_HEADS].make(), tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterCheckpoint]:
    spec = load_spec(model)
    return [
        read_saved(make_peft(FOUR_KV_HEADS, seed, r=rank), tmp_path_factory.mktemp("adapter"), spec)
        for seed, rank in enumerate((4, 24))
    ]


def of_ranks(model: Path, world_size: int, reduce: str, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), device="cuda", batch_invariant=True, **settings),
        cache=CacheConfig(num_gpu_blocks_override=64),
        lora=LoRAConfig(enable_lora=True, max_loras=2),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        parallel=ParallelConfig(tensor_parallel_size=world_size, tensor_parallel_reduce=reduce),
    )


def num_cards_or_skip(world_size: int) -> int:
    if world_size > torch.cuda.device_count():
        pytest.skip(f"{world_size} ranks need as many cards")
    return world_size


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module")
def expected(
    model: Path, adapters: list[AdapterCheckpoint], settings: dict[str, Any]
) -> dict[str, list[ModelRunnerOutput]]:
    num_cards_or_skip(min(WORLD_SIZES))
    return {
        reduce: life(make_executor(of_ranks(model, 1, reduce, **settings)), adapters)
        for reduce in ("gather", "segments")
    }


@pytest.mark.parametrize("reduce", ["gather", "segments"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_give_the_bits_of_one_card(
    model: Path,
    adapters: list[AdapterCheckpoint],
    settings: dict[str, Any],
    expected: dict[str, list[ModelRunnerOutput]],
    world_size: int,
    reduce: str,
) -> None:
    config = of_ranks(model, num_cards_or_skip(world_size), reduce, **settings)
    assert life(make_executor(config), adapters) == expected[reduce]


def test_a_rank_that_is_lost_is_told_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its card never comes to where the others' wait."""
    monkeypatch.setattr("threading.excepthook", lambda args: None)  # it would end an engine
    executor = make_executor(of_ranks(model, num_cards_or_skip(2), "gather", dtype="bfloat16"))
    executor.load()
    (rank,) = pids_below(os.getpid(), b"rank_process")
    os.kill(rank, signal.SIGKILL)

    def run() -> None:
        executor.submit(SchedulerOutput(0, (chunk(0, [1, 2], 0, BASE_MODEL, GREEDY, 1),)))
        executor.collect()

    with closing(executor), pytest.raises(RankLostError, match="rank 1"):
        run()


def test_more_ranks_than_cards_are_refused_with_both_numbers(model_path: Path) -> None:
    num_cards = torch.cuda.device_count()
    told = f"--tensor-parallel-size {num_cards + 1} is above the {num_cards} GPU"
    with pytest.raises(ConfigError, match=told):
        LLM(str(model_path), device="cuda", tensor_parallel_size=num_cards + 1)
