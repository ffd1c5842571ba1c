"""Every way of stretching positions that transformers has: read as it reads it, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lora_serve.errors import ConfigError
from lora_serve.models.rope import KINDS
from lora_serve.ops.reference import REFERENCE
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.tiny_models import LLAMA3_ROPE, LONGROPE, VOCAB_SIZE, YARN_ROPE
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


def without(rope: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key not in keys}


TOKENS = [(7 * i) % VOCAB_SIZE for i in range(80)]
THETA, ORIGINAL = "rope_theta", "original_max_position_embeddings"
BY_KIND = {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default"}}


class Edited:
    """A tiny model that transformers saved, whose config.json a user edits; None takes out."""

    def __init__(self, saved: Path, directory: Path, changes: dict[str, Any]) -> None:
        self._directory = shutil.copytree(saved, directory)
        path = directory / "config.json"
        config = json.loads(path.read_text()) | changes
        out = {key for key, value in changes.items() if value is None}
        path.write_text(json.dumps({k: v for k, v in config.items() if k not in out}))

    def theirs(self) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32)
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
        return logits

    def ours(self) -> Tensor:
        model = BareModel(self._directory, REFERENCE, torch.float32)
        return Prompt(TOKENS, range(6)).alone(model)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # What stands beside the object of rotary positions alone, or in it alone.
        ("llama-bias-yarn", {"rope_parameters": without(YARN_ROPE, ORIGINAL), ORIGINAL: 256}),
        ("llama-bias-yarn", {"rope_parameters": without(YARN_ROPE, ORIGINAL)}),
        ("llama", {"rope_parameters": without(LLAMA3_ROPE, ORIGINAL), ORIGINAL: 64}),
        ("llama", {"rope_parameters": without(LLAMA3_ROPE, ORIGINAL)}),
        ("phi4", {"rope_parameters": without(LONGROPE, ORIGINAL), ORIGINAL: 16}),
        ("qwen3", {"rope_parameters": {"rope_type": "default"}, THETA: 777.0}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", THETA: 777.0}}),
        ("glm", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
        ("olmo3", {"rope_parameters": None, "rope_scaling": YARN_ROPE}),
        # Both, and equal.
        ("llama-bias-yarn", {"rope_scaling": YARN_ROPE, THETA: 10000.0, ORIGINAL: 256}),
        ("qwen3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 3.0}}),
        ("olmo3", {"rope_scaling": YARN_ROPE}),
        # Phi-3's configs had this name once.
        ("phi4", {"rope_parameters": {**LONGROPE, "rope_type": "yarn"}}),
        ("phi4", {"rope_parameters": without(LONGROPE, ORIGINAL), ORIGINAL: None}),
    ],
)
def test_an_edited_config_gives_the_logits_of_transformers(
    name: str, changes: dict[str, Any], directories: dict[str, Path], tmp_path: Path
) -> None:
    edited = Edited(directories[name], tmp_path / "model", changes)
    torch.testing.assert_close(edited.ours(), edited.theirs(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        # As Qwen's README says it, in a config that transformers 5 saved: its theta would be lost.
        (
            "qwen3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 256}},
            "rope_scaling {'type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 256} "
            "and rope_parameters {'rope_theta': 10000.0, 'rope_type': 'default'} contradict each "
            "other; say all of it, rope_theta too, in rope_parameters, and take rope_scaling out",
        ),
        (
            "olmo3",
            {"rope_scaling": {**YARN_ROPE, "factor": 8.0}},
            "contradict each other; say all of it",
        ),
        (
            "qwen3",
            {THETA: 5e6},
            "rope_theta is 5000000.0 beside rope_parameters, and rope_theta in it is 10000.0; take "
            "out the one that is wrong",
        ),
        ("llama-bias-yarn", {ORIGINAL: 512}, f"{ORIGINAL} is 512 beside rope_parameters"),
        ("llama", {ORIGINAL: 512}, f"{ORIGINAL} is 512 beside rope_parameters"),
        ("phi4", {ORIGINAL: 512}, f"{ORIGINAL} is 512 beside rope_parameters"),
        ("phi4", {ORIGINAL: None}, f"{ORIGINAL} is 16 in rope_parameters; it must stand beside it"),
        ("glm", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25 beside rope_p"),
        ("gemma3", {"rope_local_base_freq": 7.0}, "rope_local_base_freq is 7.0 beside sliding_at"),
        ("olmo3", {THETA: 7.0}, "rope_theta is 7.0 beside full_attention"),
        (
            "olmo3",
            {"rope_parameters": None, THETA: 7.0},
            "rope_theta 7.0 is that of all layers to some versions of transformers, and to others "
            "not that of sliding_attention; say it for both kinds of layers in rope_parameters",
        ),
        (
            "qwen3",
            {"rope_parameters": BY_KIND},
            "rope_parameters must be one for all layers of this family, not one each for "
            "full_attention, sliding_attention",
        ),
        (
            "olmo3",
            {"rope_parameters": {**BY_KIND, "full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor other than 1 is not supported",
        ),
    ],
)
def test_a_config_that_contradicts_itself_is_refused_with_both_values(
    name: str, changes: dict[str, Any], told: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    edited = Edited(directories[name], tmp_path / "model", changes)
    with pytest.raises(ConfigError) as refused:
        edited.ours()
    assert told in str(refused.value)
    assert str(refused.value).count(told) == 1
