from __future__ import annotations

import pytest

from lora_serve.errors import ConfigError
from lora_serve.models.registry import ARCHITECTURES
from tests.models.configs import read


def test_an_unsupported_architecture_is_answered_with_those_supported() -> None:
    with pytest.raises(ConfigError) as told:
        read(architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in str(told.value)
    assert all(name in str(told.value) for name in ARCHITECTURES)
    with pytest.raises(ConfigError, match="none named"):
        read(architectures=None)


def test_quantised_checkpoints_are_refused_with_all_else_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as told:
        read(quantization_config={"bits": 4}, mlp_bias=True)
    assert str(told.value) == (
        "c.json: quantised checkpoints are not supported (quantization_config is set); "
        "mlp_bias is not supported"
    )
