from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_serve.errors import ConfigError
from lora_serve.layers.rotary import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from lora_serve.models.source import load_spec
from tests.fakes.tiny_models import DENSE_MODELS
from tests.models.configs import read


def test_saved_models_are_read_as_what_they_are(directories: dict[str, Path]) -> None:
    specs = {name: load_spec(directories[name]) for name in DENSE_MODELS}
    assert specs["llama"].rope == RopeSpec(10000.0, Llama3Scaling(8.0, 1.0, 4.0, 64))
    assert specs["llama"].num_kv_heads == 2
    assert not specs["llama"].qkv_bias
    assert specs["llama-bias-yarn"].qkv_bias
    assert specs["llama-bias-yarn"].output_bias
    assert specs["qwen2"].qkv_bias
    assert not specs["qwen2"].output_bias
    assert specs["qwen2"].tie_word_embeddings
    assert specs["qwen3"].qk_norm
    assert specs["qwen3"].head_size == 32
    assert specs["mistral"].sliding_window == 10
    assert {name for name, spec in specs.items() if any(spec.windows)} == {
        "mistral",
        "qwen2-windows",
    }
    assert {spec.dtype for spec in specs.values()} == {"float32"}


def test_a_silent_config_means_what_its_family_assumes() -> None:
    spec = read()
    assert (spec.num_kv_heads, spec.head_size, spec.rms_norm_eps) == (4, 16, 1e-6)
    assert spec.rope == RopeSpec(10000.0)
    assert spec.dtype is None
    mistral = read(architectures=["MistralForCausalLM"], num_attention_heads=8)
    assert (mistral.num_kv_heads, mistral.sliding_window) == (8, 4096)
    assert read(architectures=["Qwen3ForCausalLM"], num_attention_heads=32).head_size == 128


def test_older_spellings_are_read() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    spec = read(torch_dtype="bfloat16", rope_theta=5e5, rope_scaling=scaling)
    assert spec.dtype == "bfloat16"
    assert spec.rope == RopeSpec(5e5, LinearScaling(2.0))


def test_scaling_adds_positions_beyond_those_trained() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert read().max_positions == 2048
    assert read(rope_parameters={"rope_type": "linear", "factor": 2.0}).max_positions == 4096
    stretched = read(rope_parameters=yarn)
    assert stretched.max_positions == 8192
    assert isinstance(stretched.rope.scaling, YarnScaling)
    assert stretched.rope.scaling.attention_factor == pytest.approx(1.1386294)
    assert read(rope_parameters=yarn, max_position_embeddings=8192).max_positions == 8192


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number from 1 on, is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 on, is 0"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, is nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number, is 1000"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648, the most is 2147483647"),
        (
            {"max_position_embeddings": 2**24 + 1},
            "max_position_embeddings is 16777217, the most is 16777216",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, is 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoints are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_scaling": {"type": "other", "factor": 2.0}}, "type 'other' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing; long_factor is"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": ["1"]}},
            "long_factor must be a list of positive numbers, is ['1']; short_factor has 1 numbers",
        ),
        (
            {"rope_scaling": {"type": "su", "original_max_position_embeddings": 1}},
            "original_max_position_embeddings must be",
        ),
        *(
            (
                {"rope_scaling": {"rope_type": kind, "factor": 1e308}},
                "rope_scaling stretches the context to more than 16777216 positions",
            )
            for kind in ("linear", "dynamic", "yarn")
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, is 'linear'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**changes)
    assert told in str(error.value)
    assert str(error.value).startswith("c.json: ")


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        read(hidden_size=None, mlp_bias=True, hidden_act="gelu")
    assert str(error.value).count(";") >= 2
