"""Adapters that cannot be served: a 400 or 404 that says why, and nothing changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from lora_serve.demo.client import Client
from lora_serve.demo.corpus import ALPHA_LABEL, LABEL_REQUEST
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate_weights(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def empty_weights(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"")


def remove_weights(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()


def break_config(directory: Path) -> None:
    (directory / "adapter_config.json").write_text('{"r": 16,')


def raise_rank(directory: Path) -> None:
    edit_config(directory, r=128)


def make_dora(directory: Path) -> None:
    edit_config(directory, use_dora=True)


def claim_another_kind(directory: Path) -> None:
    edit_config(directory, peft_type="PROMPT_TUNING")


@pytest.mark.parametrize(
    "spoil",
    [
        truncate_weights,
        empty_weights,
        remove_weights,
        break_config,
        raise_rank,
        make_dora,
        claim_another_kind,
    ],
)
def test_a_spoilt_adapter_is_refused_and_the_old_version_goes_on(
    spoil: Callable[[Path], None],
    server: ServerProcess,
    client: Client,
    demo_paths: DemoPaths,
    tmp_path: Path,
) -> None:
    client.load_adapter("sound", demo_paths.alpha, in_place=True)
    spoilt = tmp_path / "spoilt"
    shutil.copytree(demo_paths.beta, spoilt)
    spoil(spoilt)
    assert_refused(server, spoilt, 400)
    assert client.complete("sound", LABEL_REQUEST).text == ALPHA_LABEL


def test_an_adapter_that_is_not_there_is_not_found(
    server: ServerProcess, client: Client, demo_paths: DemoPaths, tmp_path: Path
) -> None:
    client.load_adapter("sound", demo_paths.alpha, in_place=True)
    assert_refused(server, tmp_path / "spoilt", 404)
    assert client.complete("sound", LABEL_REQUEST).text == ALPHA_LABEL


def assert_refused(server: ServerProcess, path: Path, status: int) -> None:
    """Load in place over an adapter in use: the error has OpenAI's shape."""
    body = {"lora_name": "sound", "lora_path": str(path), "load_inplace": True}
    response = httpx.post(f"{server.base_url}/v1/load_lora_adapter", json=body, timeout=60)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status
    assert str(path) in error["message"] or "spoilt" in error["message"]


def test_files_that_change_under_a_loaded_adapter_change_no_answer(
    client: Client, demo_paths: DemoPaths, tmp_path: Path
) -> None:
    path = tmp_path / "adapter"
    shutil.copytree(demo_paths.alpha, path)
    client.load_adapter("loaded", path)
    truncate_weights(path)
    assert client.complete("loaded", LABEL_REQUEST, cache_salt="1").text == ALPHA_LABEL
    shutil.rmtree(path)
    assert client.complete("loaded", LABEL_REQUEST, cache_salt="2").text == ALPHA_LABEL
