from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.peft_adapters import make_peft
from tests.fakes.served_model import save_served_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def adapter_paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of different ranks for the served model."""
    root = tmp_path_factory.mktemp("adapters")
    paths = [root / str(seed) for seed in range(3)]
    for seed, path in enumerate(paths):
        make_peft("qwen2", seed, r=(4, 8, 16)[seed]).save_pretrained(str(path))
    return paths
