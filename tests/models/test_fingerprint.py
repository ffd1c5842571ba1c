from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.layers.rotary import RopeSpec, rotary_table
from lora_serve.models.fingerprint import model_fingerprint
from lora_serve.models.source import load_spec


@pytest.fixture
def facts(directories: dict[str, Path]) -> dict[str, Any]:
    return {
        "spec": load_spec(directories["qwen2"]),
        "dtype": torch.bfloat16,
        "weights_digest": b"weights",
        "cos_sin": rotary_table(RopeSpec(), 16, 64),
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
        {"cos_sin": rotary_table(RopeSpec(), 16, 65)},
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
