from __future__ import annotations

from lora_serve.models.registry import read_spec
from tests.models.configs import LLAMA, read

MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


def test_all_layers_have_the_window() -> None:
    assert read(**MISTRAL, sliding_window=10).windows == (10, 10)


def test_a_null_window_is_none_and_a_silent_config_has_one() -> None:
    config = {**LLAMA, **MISTRAL, "sliding_window": None}
    assert [spec.window for spec in read_spec(config, "c.json").kv_specs()] == [None, None]
    assert read(**MISTRAL).windows == (4096, 4096)
