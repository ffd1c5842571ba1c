from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from lora_serve.models.base import lora_modules
from lora_serve.models.decoder_shape import LM_HEAD
from lora_serve.models.source import load_spec
from tests.fakes.tiny_models import TINY_MODELS


@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_tensors_are_those_of_transformers(
    directories: dict[str, Path], tiny_models: dict[str, PreTrainedModel], family: str
) -> None:
    expected = {name: tuple(t.shape) for name, t in tiny_models[family].state_dict().items()}
    if tiny_models[family].config.tie_word_embeddings:
        del expected[LM_HEAD]
    assert load_spec(directories[family]).tensor_shapes() == expected


def test_linear_layers_are_numbered_in_the_order_in_which_they_come(
    directories: dict[str, Path],
) -> None:
    linears = load_spec(directories["qwen2"]).linears()
    assert [linear.index for linear in linears] == list(range(12))
    assert linears[4].projections == (
        ("model.layers.1.self_attn.q_proj", 64),
        ("model.layers.1.self_attn.k_proj", 32),
        ("model.layers.1.self_attn.v_proj", 32),
    )


def test_adapters_may_change_the_seven_projections_of_each_layer(
    directories: dict[str, Path],
) -> None:
    modules = lora_modules(load_spec(directories["qwen3"]).linears())
    assert len(modules) == 3 * 7
    assert modules["model.layers.2.self_attn.q_proj"] == (128, 64)
    assert modules["model.layers.2.self_attn.o_proj"] == (64, 128)
    assert modules["model.layers.0.mlp.down_proj"] == (64, 96)
