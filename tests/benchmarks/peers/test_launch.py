from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.environment import Environment
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.ours import LoraServe
from benchmarks.peers.peer import Deployment, Peer
from benchmarks.peers.transformers import Transformers
from benchmarks.peers.vllm import Vllm
from lora_serve.cli.arguments import engine_config, server_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.cli.serve import add_arguments


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    for name in ("model", "a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe").write_text(name)
    adapters = {"a": tmp_path / "a", "b": tmp_path / "b"}
    return Deployment(checkpoint=tmp_path / "model", adapters=adapters, num_threads=3)


@pytest.mark.parametrize("peer", [LoraServe(), Vllm(), LlamaCpp(), OpenVino(), Transformers()])
def test_every_engine_is_told_the_port_and_all_adapters(
    peer: Peer, deployment: Deployment, tmp_path: Path
) -> None:
    command = peer.launch(Environment(tmp_path), deployment, 8123).command
    assert "8123" in command
    text = " ".join(command)
    converted = isinstance(peer, LlamaCpp)  # its adapters are files of its own
    for name, path in deployment.adapters.items():
        assert (f"/{name}-" if converted else f"{name}={path}") in text


def test_our_own_flags_are_those_that_the_server_has(
    deployment: Deployment, tmp_path: Path
) -> None:
    command = LoraServe().launch(Environment(tmp_path), deployment, 8123).command
    parser = OneLineParser()
    add_arguments(parser)
    args = parser.parse_args(command[command.index("serve") + 1 :])
    config = engine_config(args)
    assert config.scheduler.max_num_seqs == deployment.max_running
    assert [name for name, _ in config.lora.modules] == ["a", "b"]
    assert config.model.cpu_threads == 3
    assert server_config(args).port == 8123


def test_our_own_server_is_told_how_to_quantise(deployment: Deployment, tmp_path: Path) -> None:
    quantised = replace(deployment, quantization="int8", quantize_activations=True)
    command = LoraServe().launch(Environment(tmp_path), quantised, 8123).command
    assert command[command.index("--quantization") + 1] == "int8"
    assert "--quantize-activations" in command


def test_llama_cpp_is_asked_for_adapters_by_number(deployment: Deployment, tmp_path: Path) -> None:
    fields = LlamaCpp().launch(Environment(tmp_path), deployment, 1).adapter_fields
    assert fields["b"] == {"lora": [{"id": 1, "scale": 1.0}]}


def test_a_converted_model_is_not_used_for_another_checkpoint(
    deployment: Deployment, tmp_path: Path
) -> None:
    for peer in (LlamaCpp(), OpenVino()):
        before = peer.launch(Environment(tmp_path), deployment, 1).command
        (deployment.checkpoint / "recipe").write_text(f"another for {peer.name}")
        assert peer.launch(Environment(tmp_path), deployment, 1).command != before
