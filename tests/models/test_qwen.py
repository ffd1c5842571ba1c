from __future__ import annotations

from typing import Any

import pytest

from lora_serve.errors import ConfigError
from tests.models.configs import read


def read_qwen(**changes: Any) -> tuple[int | None, ...]:
    """The windows of a Qwen 2 of two layers."""
    settings = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, **changes}
    return read(sliding_window=512, **settings).windows


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 512)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (512, 512)),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, (512, 512)),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, (None, None)),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (512, None),
        ),
    ],
)
def test_layers_have_a_window_only_when_the_config_tells_them_to(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read_qwen(**changes) == windows


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (["full_attention", "chunked_attention"], "layers of chunked_attention are not supported"),
        (["full_attention"] * 3, "layer_types names 3 layers of 2"),
        ("full_attention", "layers of 'full_attention' are not supported"),
    ],
)
def test_layers_of_another_attention_are_refused(kinds: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_qwen(use_sliding_window=True, layer_types=kinds)
