from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_serve.config import EngineConfig, LoRAConfig, ModelConfig, ServerConfig
from lora_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(max_model_len=0), "--max-model-len 0 must be at least 1"),
        (lambda: ModelConfig(cpu_threads=-1), "--cpu-threads -1 must be at least 1"),
        (lambda: ModelConfig(max_logprobs=-1), "--max-logprobs -1 must be at least 0"),
        (lambda: ServerConfig(max_body_bytes=0), "--max-body-bytes 0 must be at least 1"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_its_limit(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_two_adapters_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' 2 times"):
        LoRAConfig(enable_lora=True, lora_modules=("a=/one", "b=/two", "a=/three"))


@pytest.mark.parametrize("name", ["base", "base:a"])
def test_an_adapter_that_the_models_own_name_would_hide_is_refused(name: str) -> None:
    lora = LoRAConfig(enable_lora=True, lora_modules=(f"{name}=/one",))
    with pytest.raises(ConfigError, match="served as base, other; choose another name"):
        EngineConfig(model=ModelConfig(model="/m", served_model_name=("base", "other")), lora=lora)
    EngineConfig(model=ModelConfig(model="/m"), lora=lora)
