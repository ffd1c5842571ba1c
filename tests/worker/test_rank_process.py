"""Ranks that do not come at the start: told of, and not waited for without an end."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from lora_serve.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from lora_serve.distributed import agreement
from lora_serve.errors import RankLostError
from lora_serve.ops.select import available_ops
from lora_serve.worker import rank_process
from lora_serve.worker.rank_process import start_ranks
from lora_serve.worker.rank_server import RankLinks
from lora_serve.worker.worker import Worker
from tests.fakes.ranks import SECONDS, make_rank, start_threads
from tests.fakes.tiny_models import ALL_MODELS, ONE_LAYER, save

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ALL_MODELS[ONE_LAYER].make(), tmp_path_factory.mktemp("model") / "model")


def test_a_process_that_ends_at_its_start_is_told_of(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[BaseException | None] = []  # by the hook that would end the engine
    monkeypatch.setattr(threading, "excepthook", lambda told: ended.append(told.exc_value))
    monkeypatch.setattr(rank_process.sys, "executable", shutil.which("false"))
    config = EngineConfig(
        model=ModelConfig(model=str(model), cpu_threads=1),
        cache=CacheConfig(num_gpu_blocks_override=16),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    with pytest.raises(RankLostError, match="rank 1"):
        start_ranks(config).load()


def test_a_rank_that_hangs_at_its_start_is_not_waited_for_for_ever(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(worker: Worker, links: RankLinks) -> None:
        links.steps.receive(SECONDS)

    monkeypatch.setattr(agreement, "LOAD_SECONDS", 0.2)
    with pytest.raises(RankLostError, match="in time"):
        start_threads(2, lambda group: make_rank(model, group), hang).load()
