"""Tests of the GPU engine on CPU tensors, by kernels that Triton interprets (tests/__init__.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.peft_adapters import make_peft
from tests.fakes.served_model import save_served_model
from tests.fakes.threads import one_thread
from tests.fakes.tiny_models import ONE_LAYER

__all__ = ["one_thread"]


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """Lets `--override-op all=triton` find the backend, as TRITON_INTERPRET=1 does for users."""
    knobs = pytest.importorskip("triton", reason="Triton is not installed").knobs
    if not knobs.runtime.interpret:
        pytest.skip("Triton compiles here: this machine has a GPU")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("served") / "model", ONE_LAYER)


@pytest.fixture(scope="session")
def adapter_paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of different ranks."""
    paths = [tmp_path_factory.mktemp("adapters") / str(rank) for rank in (4, 13)]
    for seed, (path, rank) in enumerate(zip(paths, (4, 13), strict=True)):
        make_peft(ONE_LAYER, seed, r=rank).save_pretrained(str(path))
    return paths
