from __future__ import annotations

import pytest

from lora_serve.config import ModelConfig
from lora_serve.engine.frontend.base_model import other_base_model
from lora_serve.messages import AdapterInfo


def adapter_on(base_model: str) -> AdapterInfo:
    return AdapterInfo("a", "/a", "ab" * 32, 0, 8, 1, "resident", False, 0, 0.0, base_model)


def test_another_repository_of_the_hub_is_told_with_both_names() -> None:
    model = ModelConfig(model="Qwen/Qwen2.5-0.5B")
    warning = other_base_model(model, adapter_on("Qwen/Qwen2.5-3B-Instruct"))
    assert warning is not None
    assert "'a'" in warning
    assert "Qwen/Qwen2.5-3B-Instruct" in warning
    assert "Qwen/Qwen2.5-0.5B" in warning


@pytest.mark.parametrize(
    ("model", "served", "trained"),
    [
        ("Qwen/Qwen2.5-0.5B", (), "Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-0.5B", (), "mirror/qwen2.5-0.5b"),
        ("Qwen/Qwen2.5-0.5B", (), "/data/models/base"),
        ("Qwen/Qwen2.5-0.5B", (), ""),
        ("/data/models/base", (), "Qwen/Qwen2.5-0.5B"),
        ("/data/models/base", ("acme/assistant",), "Qwen/Qwen2.5-0.5B"),
        ("acme/copy", ("Qwen/Qwen2.5-0.5B",), "Qwen/Qwen2.5-0.5B"),
        ("lora_serve/engine", (), "Qwen/Qwen2.5-0.5B"),  # a directory here
    ],
)
def test_what_may_well_be_the_same_model_is_no_matter(
    model: str, served: tuple[str, ...], trained: str
) -> None:
    config = ModelConfig(model=model, served_model_name=served)
    assert other_base_model(config, adapter_on(trained)) is None
