from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.layers.rotary import RopeSpec, rotary_table
from lora_serve.models.dense import DenseSpec
from lora_serve.models.facts import facts_text
from lora_serve.models.fingerprint import model_fingerprint
from lora_serve.models.gemma import GemmaSpec
from lora_serve.models.source import load_spec
from tests.fakes.tiny_models import TINY_MODELS
from tests.models.configs import read


@pytest.fixture
def facts(directories: dict[str, Path]) -> dict[str, Any]:
    return {
        "spec": load_spec(directories["qwen2"]),
        "dtype": torch.bfloat16,
        "weights_digest": b"weights",
        "rotary_tables": [rotary_table(RopeSpec(), 16, 64)],
        "numerics": "kernels-1",
        "block_size": 16,
    }


def test_equal_models_have_equal_fingerprints(facts: dict[str, Any]) -> None:
    fingerprint = model_fingerprint(**facts)
    assert len(fingerprint) == 32
    assert model_fingerprint(**facts) == fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"weights_digest": b"other weights"},
        {"rotary_tables": [rotary_table(RopeSpec(), 16, 65)]},
        {"rotary_tables": [rotary_table(RopeSpec(), 16, 64)] * 2},
        {"numerics": "kernels-2"},
        {"block_size": 32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_may_change_kv_changes_the_fingerprint(
    facts: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert model_fingerprint(**{**facts, **changes}) != model_fingerprint(**facts)


def test_a_fact_of_the_spec_changes_the_fingerprint(facts: dict[str, Any]) -> None:
    spec = replace(facts["spec"], rms_norm_eps=1e-5)
    assert model_fingerprint(**{**facts, "spec": spec}) != model_fingerprint(**facts)


def test_the_facts_of_models_whose_kv_may_be_stored_stay_the_same_text() -> None:
    """Else an upgrade loses all stored KV."""
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).facts() == (
        "DecoderSpec(architecture='LlamaForCausalLM', vocab_size=100, hidden_size=64, "
        "intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_size=16, "
        "rms_norm_eps=1e-06, rope=RopeSpec(theta=10000.0, scaling=LinearScaling(factor=2.0)), "
        "max_positions=4096, qkv_bias=False, output_bias=False, qk_norm=False, "
        "tie_word_embeddings=False, sliding_window=None, dtype=None)"
    )
    mistral = read(architectures=["MistralForCausalLM"], num_key_value_heads=2, sliding_window=10)
    assert "sliding_window=10, " in mistral.facts()


PINNED_FACTS = {  # the beginning of their SHA-256
    "llama": "c60fa946b31ce5e0",
    "llama-bias-yarn": "32c38aff0d67c2a5",
    "qwen2": "86fde41d52bf0d43",
    "qwen2-windows": "f006e0eb797d19e2",
    "qwen3": "68085d802efcdcb5",
    "mistral": "6687927109d50c96",
    "gemma2": "ea818b8c70d05056",
    "gemma3": "e355196e59b469c3",
    "smollm3": "0629a636c37c90c3",
    "granite": "6ef3be3e663e168b",
    "olmo2": "b57edfaf1a98ed3b",
    "olmo3": "eaf5cc93f7af1f54",
    "phi3": "156d2a6c3f2bb06b",
    "phi4": "10834c5def43f9a9",
    "glm": "e2086f652a12a863",
    "glm4": "f1d99fcb1fe017bb",
    "cohere": "f37f387c7e0d73ec",
    "cohere-plus": "29c03545f80c6cfc",
    "cohere2": "f2c54007a585d68b",
    "starcoder2": "149f889bc9a45b92",
    "mixtral": "5bf53484478ff7f1",
    "olmoe": "d1ee38764be6b71b",
    "olmoe-clipped": "9b6a184b9a0f6343",
    "qwen2-moe": "f493f9bbb11e0f44",
    "qwen3-moe": "3cc74ca3b107baee",
    "gpt-oss": "d2f39e48cf00e776",
    "granite4": "0ca8caa81efc48a7",
    "granite4-moe": "0e8e0c124b6b403f",
    "granite-moe": "76d33820d21baf0d",
    "granite-moe-shared": "9aa41d3ea9db3a7d",
}


@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_facts_of_each_family_stay_the_same_text(
    directories: dict[str, Path], family: str
) -> None:
    facts = replace(load_spec(directories[family]), dtype=None).facts()
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    assert family in PINNED_FACTS, f'a new family is pinned, too: add "{family}": "{digest}"'
    assert digest == PINNED_FACTS[family], facts


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDense(DenseSpec):
    blend: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGemma(GemmaSpec):
    blend: float = 1.0


@pytest.mark.parametrize(("family", "new"), [("qwen2", NewDense), ("gemma2", NewGemma)])
def test_a_fact_that_is_added_is_written_only_where_a_model_differs_from_its_default(
    directories: dict[str, Path], family: str, new: type[NewDense | NewGemma]
) -> None:
    spec = load_spec(directories[family])
    same = new(**{each.name: getattr(spec, each.name) for each in fields(spec)})
    assert same.facts() == spec.facts()
    other = replace(same, blend=0.5)
    assert other.facts() == f"{spec.facts()[:-1]}, blend=0.5)"


def test_a_fact_that_is_added_to_the_rotary_scaling_is_written_likewise() -> None:
    @dataclass(frozen=True)
    class Scaling:
        factor: float
        blend: float = 2.0

    assert (
        facts_text(RopeSpec(3.0, Scaling(4.0)))
        == "RopeSpec(theta=3.0, scaling=Scaling(factor=4.0))"
    )
    assert facts_text(Scaling(4.0, 1.0)) == "Scaling(factor=4.0, blend=1.0)"


def test_every_fact_of_a_family_is_in_its_text(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that no test changes: two models that differ in one share no KV."""
    monkeypatch.setattr(DenseSpec, "__post_init__", lambda spec: None)  # also what no model has
    for directory in directories.values():
        spec = load_spec(directory)
        for field in fields(spec):
            value = getattr(spec, field.name)
            other = replace(spec, **{field.name: _other(value)})
            assert other.facts() != spec.facts(), field.name


def _other(value: object) -> object:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case tuple():
            return (*value, 7)
        case RopeSpec():
            return RopeSpec(3.0)
        case _:
            return f"{value} else"
