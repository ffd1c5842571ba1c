"""What is told of ranks before torch is imported, on machines of so many cores."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from lora_serve.engine.frontend import rank_checks
from lora_serve.engine.frontend.rank_checks import check_ranks, warn_of_shared_cores
from lora_serve.engine.settings import engine_config
from lora_serve.errors import ConfigError
from lora_serve.ops.cpu import numa


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no driver of GPUs, and no torch."""
    for module in (numa, rank_checks):
        monkeypatch.setattr(module, "default_num_threads", lambda: 8)
    monkeypatch.setattr(rank_checks, "GPU_DRIVERS", (str(tmp_path / "driver"),))
    monkeypatch.setitem(sys.modules, "torch", None)


def model_of(directory: Path, config: object) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def refusal(model: str, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_ranks(engine_config(model=model, **settings))
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_ranks_that_divide_nothing_evenly_pass(tmp_path: Path, size: int) -> None:
    model = model_of(tmp_path, {"num_attention_heads": 8, "vocab_size": 301})
    check_ranks(engine_config(model=model, tensor_parallel_size=size))


def test_more_ranks_than_cores_and_heads_are_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path, {"num_attention_heads": 4})
    assert refusal(model, tensor_parallel_size=1000).splitlines() == [
        "--tensor-parallel-size 1000 is above the model's 4 attention heads; lower it",
        "--tensor-parallel-size 1000 is above the 8 cores that may be used; lower it",
    ]
    told = "--tensor-parallel-size 5 is above the model's 4 attention heads; lower it"
    assert refusal(model, tensor_parallel_size=5) == told
    for module in (numa, rank_checks):
        monkeypatch.setattr(module, "default_num_threads", lambda: 1)
    of_one = "--tensor-parallel-size 2 is above the 1 core that may be used; lower it"
    assert refusal(model, tensor_parallel_size=2) == of_one


@pytest.mark.parametrize(
    "config", [{"text_config": {"num_attention_heads": 2}, "num_heads": 16}, {"n_head": 2}]
)
def test_heads_are_found_where_families_have_them(tmp_path: Path, config: object) -> None:
    assert "the model's 2 attention heads" in refusal(
        model_of(tmp_path, config), tensor_parallel_size=3
    )


@pytest.mark.parametrize("text", [None, "", "[]", '{"num_heads": true}', "[" * 100_000, "\xff"])
def test_a_config_that_says_no_heads_is_left_to_later_checks(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    check_ranks(engine_config(model=str(tmp_path), tensor_parallel_size=8))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_where_gpus_may_be_ranks_need_no_core(tmp_path: Path, device: str) -> None:
    (tmp_path / "driver").touch()
    check_ranks(engine_config(model="m", device=device, tensor_parallel_size=9))
    assert "8 cores" in refusal("m", device="cpu", tensor_parallel_size=9)


def test_nodes_that_cannot_have_the_ranks_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world_size: int) -> None:
        raise ConfigError(f"{world_size} ranks")

    monkeypatch.setattr(numa, "rank_shares", refuse)
    assert refusal("m", cpu_ranks="auto", tensor_parallel_size=3) == "3 ranks"


@pytest.mark.parametrize(
    ("num_threads", "num_ranks", "num_replicas", "told"),
    [
        (8, 1, 1, None),
        (None, 8, 4, None),
        (2, 2, 2, None),
        (1000, 1, 1, "--cpu-threads 1000: 1000 threads share the 8 cores"),
        (5, 2, 1, "--cpu-threads 5 for each of 2 ranks: 10 threads share the 8 cores"),
        (1, 3, 4, "--cpu-threads 1 for each of 3 ranks of 4 replicas: 12 threads share"),
    ],
)
def test_more_threads_than_cores_are_warned_of(
    num_threads: int | None,
    num_ranks: int,
    num_replicas: int,
    told: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = engine_config(cpu_threads=num_threads, tensor_parallel_size=num_ranks)
    with caplog.at_level(logging.WARNING):
        warn_of_shared_cores(config, num_replicas)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (told is not None)
    assert all(message.startswith(told or "") for message in messages)
    most = max(1, 8 // (num_ranks * num_replicas))
    assert all(message.endswith(f"lower it to {most}, or leave it out") for message in messages)
