"""A thousand adapters in one server that has room for a few, each with an answer of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
import torch
from safetensors.torch import save_file

from lora_serve.demo.client import Client
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.recording import Prompted, Recorded, record_alone, record_together

NUM_ADAPTERS = 1000
NUM_ASKED = 40


def write_adapter(directory: Path, seed: int) -> None:
    """Rank 1 on one projection, in bytes of its own."""
    directory.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": 1,
        "lora_alpha": 1,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    size = Recipe().hidden_size
    generator = torch.Generator().manual_seed(seed)
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(1, size, generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(size, 1, generator=generator),
    }
    save_file(tensors, directory / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def crowd(
    server: ServerProcess, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Path]]:
    """A thousand adapters, registered as their directories are called; gone afterwards."""
    root = tmp_path_factory.mktemp("crowd")
    paths = [root / f"crowd-{seed}" for seed in range(NUM_ADAPTERS)]
    for seed, path in enumerate(paths):
        write_adapter(path, seed)
        client.load_adapter(path.name, path)
    yield paths
    for path in paths:
        client.unload_adapter(path.name)


def question(name: str) -> Prompted:
    return Prompted(name, tuple(range(40, 100)), max_tokens=4)


def ask_alone(cold_server: ServerProcess, paths: list[Path]) -> list[Recorded]:
    """What each answers on a cold server that knows no other of them."""
    answers = []
    with Client(cold_server.base_url) as client:
        for path in paths:
            client.load_adapter(path.name, path)
            answers += asyncio.run(record_alone(cold_server.base_url, [question(path.name)]))
            client.unload_adapter(path.name)
    return answers


def test_a_thousand_adapters_are_registered_and_told_apart(
    server: ServerProcess, crowd: list[Path]
) -> None:
    models = httpx.get(f"{server.base_url}/v1/models", timeout=60).json()["data"]
    cards = [card for card in models if card["id"].startswith("crowd-")]
    assert len(cards) == NUM_ADAPTERS
    assert len({card["digest"] for card in cards}) == NUM_ADAPTERS
    assert {card["residency"] for card in cards} == {"resident", "evicted"}


def test_any_of_them_at_once_answers_as_if_alone(
    server: ServerProcess, cold_server: ServerProcess, crowd: list[Path]
) -> None:
    chosen = Random(0).sample(crowd, NUM_ASKED)
    alone = ask_alone(cold_server, chosen)
    requests = [question(path.name) for path in chosen]
    for _ in range(2):
        together = asyncio.run(record_together(server.base_url, requests))
        assert all(one.equals(other) for one, other in zip(together, alone, strict=True))
    assert len({tuple(recorded.logprobs) for recorded in alone}) == NUM_ASKED
