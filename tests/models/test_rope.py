"""Every way of stretching positions that transformers has: read as it reads it, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lora_serve.errors import ConfigError
from lora_serve.models.rope import KINDS
from tests.models.configs import LLAMA, read

CONTEXT = LLAMA["max_position_embeddings"]
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
    },
    *(
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **more}
        for more in (
            {},
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            {"mscale": 0.707, "mscale_all_dim": 0.707},
            {"mscale": 0.5},
            {"mscale": 0, "mscale_all_dim": 1.0},
            {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 0.8},
        )
    ),
]


def test_no_kind_of_transformers_is_left_out() -> None:
    tried = {each["rope_type"] for each in PARAMETERS}
    assert tried == set(KINDS)
    assert {*ROPE_INIT_FUNCTIONS, "default"} - tried == {"proportional"}


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda each: "-".join(map(str, each)))
def test_angles_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    """The context is as long as the model's."""
    given = {"rope_theta": 5e5, **parameters}
    config = LlamaConfig(
        hidden_size=LLAMA["hidden_size"],
        num_attention_heads=LLAMA["num_attention_heads"],
        max_position_embeddings=CONTEXT,
        rope_parameters=dict(given),
    )
    positions = torch.arange(CONTEXT)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    (table,) = read(rope_parameters=given).rotary_tables(CONTEXT)
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    torch.testing.assert_close(table[:CONTEXT], expected, rtol=0, atol=3e-4)
    older = {key: value for key, value in parameters.items() if key != "rope_type"}
    older["type"] = parameters["rope_type"]
    assert read(rope_scaling=older, rope_theta=5e5) == read(rope_parameters=given)


@pytest.mark.parametrize("kind", ["proportional", "mrope", "ntk"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"of type '{kind}' is not supported; default, dynamic"):
        read(rope_scaling={"rope_type": kind, "factor": 2.0})


def test_mscale_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="mscale must be a positive number, is -1"):
        read(rope_scaling={"type": "yarn", "factor": 2.0, "mscale": -1, "mscale_all_dim": 1.0})
