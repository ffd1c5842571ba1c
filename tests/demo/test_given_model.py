from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_serve.demo.client import Client
from lora_serve.demo.given_model import GivenModel, distinct_adapters, given_model
from lora_serve.demo.random_adapters import write_random_adapter
from lora_serve.demo.scenarios import MODEL_NAME
from lora_serve.errors import ConfigError
from tests.fakes.gguf_files import save_gguf
from tests.fakes.label_server import LabelServer, serving
from tests.fakes.tiny_models import TINY_MODELS


def test_the_projections_of_a_file_are_those_of_its_attention(tmp_path: Path) -> None:
    path = save_gguf(TINY_MODELS["phi3"].make(), tmp_path / "m.gguf")
    given = given_model(str(path), print)
    assert given.model == str(path)
    layers = range(3)
    assert given.projections == {
        **{f"model.layers.{i}.self_attn.qkv_proj": (64, 128) for i in layers},
        **{f"model.layers.{i}.self_attn.o_proj": (64, 64) for i in layers},
    }


def test_a_model_that_is_not_there_is_one_error() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        given_model("./nowhere", print)


def test_random_adapters_are_equal_for_equal_seeds_alone(tmp_path: Path) -> None:
    projections = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.1.mlp.c_fc": (8, 4)}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_adapter(tmp_path / name, projections, "base", seed, 1.0)
    contents = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.mlp.c_fc.lora_B.weight"].shape == (4, 8)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["c_fc", "q_proj"]


class DeafServer(LabelServer):
    """Answers whatever is loaded as the base model does."""

    def load(self, body: dict[str, Any]) -> int:
        Path(body["lora_path"], "label").write_text("always this")
        return super().load(body)


def test_a_model_that_no_adapter_changes_is_told(tmp_path: Path) -> None:
    given = GivenModel("org/model", {"model.layers.0.self_attn.q_proj": (8, 6)})
    server = DeafServer(MODEL_NAME, "always this", None)
    with (
        serving(server) as url,
        Client(url) as client,
        pytest.raises(ConfigError, match=r"org/model: adapters of rank 8 .* do not change its ans"),
    ):
        distinct_adapters(client, given, tmp_path)
