from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from lora_serve.models.base import lora_modules
from lora_serve.models.source import load_spec
from lora_serve.ops.reference import REFERENCE
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.tiny_models import TINY_MODELS


@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_tensors_are_those_that_transformers_saves(
    directories: dict[str, Path], family: str
) -> None:
    with safe_open(directories[family] / "model.safetensors", "pt") as stored:
        expected = {name: tuple(stored.get_slice(name).get_shape()) for name in [*stored.keys()]}
    assert load_spec(directories[family]).tensor_shapes() == expected


def test_a_decoder_that_was_saved_alone_is_read(
    tiny_models: dict[str, PreTrainedModel], directories: dict[str, Path], tmp_path: Path
) -> None:
    """Qwen3-Embedding was: its tensors' names lack the prefix, its config names the whole."""
    tiny_models["qwen2"].base_model.save_pretrained(tmp_path)
    config = (directories["qwen2"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert "layers.0.self_attn.q_proj.weight" in [*stored.keys()]
    prompt = Prompt(list(range(40)), range(6))
    alone, whole = (
        prompt.alone(BareModel(directory, REFERENCE, torch.float32))
        for directory in (tmp_path, directories["qwen2"])
    )
    assert torch.equal(alone, whole)


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
