from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.fakes.threads import one_thread
from tests.fakes.tiny_models import TINY_MODELS, save

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, PreTrainedModel]:
    return {name: tiny.make() for name, tiny in TINY_MODELS.items()}


@pytest.fixture(scope="session")
def directories(
    tiny_models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Where each tiny model is saved; not to be written to."""
    return {name: save(model, tmp_path_factory.mktemp(name)) for name, model in tiny_models.items()}
