from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lora_serve.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
    rotary_table,
)

HEAD_SIZE = 64
SCALINGS: dict[str, tuple[dict[str, Any], RopeSpec]] = {
    "default": ({"rope_type": "default", "rope_theta": 1e6}, RopeSpec(1e6)),
    "linear": ({"rope_type": "linear", "factor": 4.0}, RopeSpec(scaling=LinearScaling(4.0))),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        RopeSpec(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        RopeSpec(scaling=YarnScaling(4.0, 2048, attention_factor=1.1386294361119891)),
    ),
    "yarn untruncated": (
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 0.9,
            "truncate": False,
        },
        RopeSpec(scaling=YarnScaling(2.0, 512, 16.0, 2.0, 0.9, truncate=False)),
    ),
}


@pytest.mark.parametrize(("parameters", "rope"), SCALINGS.values(), ids=SCALINGS.keys())
def test_the_table_is_that_of_transformers(parameters: dict[str, Any], rope: RopeSpec) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    positions = torch.arange(0, 8192, 7)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    half = HEAD_SIZE // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    table = rotary_table(rope, HEAD_SIZE, 8192)
    assert table.dtype == torch.float32
    # At position 8000 the last bit of a frequency moves an angle by 5e-4.
    torch.testing.assert_close(table[positions], expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(table[positions[:30]], expected[:30], rtol=0, atol=2e-5)


SHORT = tuple(1 + 0.01 * i for i in range(HEAD_SIZE // 2))
LONG = tuple(1 + 0.5 * i for i in range(HEAD_SIZE // 2))
LONGROPE = LongRopeScaling(SHORT, LONG, 512, attention_factor=1.2)
LONGROPE_PARAMETERS = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": list(SHORT),
    "long_factor": list(LONG),
    "attention_factor": 1.2,
}


@pytest.mark.parametrize("context_len", [400, 512, 513, 1800])
@pytest.mark.parametrize(
    ("parameters", "rope"),
    [
        (LONGROPE_PARAMETERS, RopeSpec(scaling=LONGROPE)),
        ({"rope_type": "dynamic", "factor": 3.0}, RopeSpec(scaling=DynamicScaling(3.0, 512))),
    ],
    ids=["longrope", "dynamic"],
)
def test_the_table_is_that_of_transformers_for_a_context_of_that_length(
    parameters: dict[str, Any], rope: RopeSpec, context_len: int
) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    positions = torch.arange(context_len)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    half = HEAD_SIZE // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    table = rotary_table(rope, HEAD_SIZE, 2000, context_len=context_len)
    torch.testing.assert_close(table[:context_len], expected, rtol=0, atol=3e-4)


def test_more_positions_change_none_before() -> None:
    rope = SCALINGS["yarn"][1]
    assert torch.equal(rotary_table(rope, 32, 100), rotary_table(rope, 32, 1000)[:100])


def test_each_angle_has_the_cosine_and_the_sine_that_it_has_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's threads do not: where two are the first to ask MKL, one gets half of the digits."""

    def shared_by_threads(*_: object) -> None:
        raise AssertionError("torch shares it among threads")

    for name in ("cos", "sin", "cos_", "sin_"):
        monkeypatch.setattr(torch.Tensor, name, shared_by_threads)
        monkeypatch.setattr(torch, name, shared_by_threads)
    table = rotary_table(RopeSpec(theta=10000.0), 16, 2048)
    for position in (1, 700, 1023, 1024, 2047):
        frequencies = torch.tensor([10000.0 ** -(i / 8) for i in range(8)])
        angles = (position * frequencies).tolist()  # rounded to float32, as transformers has them
        alone = [*map(math.cos, angles), *map(math.sin, angles)]
        assert torch.equal(table[position], torch.tensor(alone))
