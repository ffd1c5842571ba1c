from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lora_serve.errors import ConfigError
from lora_serve.models.source import load_spec, model_path
from lora_serve.regular_file import MAX_JSON_BYTES


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert model_path(str(tmp_path), None, with_weights=True) == tmp_path


@pytest.mark.parametrize("model", ["", "./nowhere", "/nowhere/at/all", "name", "a/b/c"])
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a hub id"):
        model_path(model, None, with_weights=True)


def test_a_hub_id_that_is_none_is_refused_with_the_hubs_reason() -> None:
    with pytest.raises(ConfigError, match="could not be fetched from the hub"):
        model_path("not valid/a b", None, with_weights=False)


@pytest.mark.parametrize(
    ("content", "told"), [("{", "is not JSON"), ("[]", "no JSON object"), ("\x80", "is not JSON")]
)
def test_a_broken_config_is_refused(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=told):
        load_spec(tmp_path)


def test_a_config_that_never_ends_or_is_not_written_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{config} is not a regular file"):
        load_spec(tmp_path)
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(ConfigError, match=f"{config} is not a regular file"):
        load_spec(tmp_path)
    config.unlink()
    config.write_bytes(b" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(ConfigError, match="more than 16,777,216 bytes"):
        load_spec(tmp_path)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; name one"):
        load_spec(tmp_path)


def test_a_path_that_is_not_there_is_told_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        model_path("./nosuch", None, with_weights=False)
    assert f"there is no {tmp_path / 'nosuch'}, see that it is spelled right" in str(refused.value)


@pytest.mark.parametrize("model", ["smollm3", "smolm2", "SmolLM2", "smollm"])
def test_what_is_nearly_the_name_that_is_fetched_is_told_so(model: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean smollm2\?"):
        model_path(model, None, with_weights=False)


def test_another_name_is_told_of_none() -> None:
    with pytest.raises(ConfigError, match=r"(?!.*did you mean)neither a directory nor"):
        model_path("qwen", None, with_weights=False)


def test_an_adapter_is_no_model_and_its_base_is_named(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refused:
        model_path(str(tmp_path), None, with_weights=False)
    command = f"lora-serve serve org/base --enable-lora --lora-modules NAME={tmp_path}"
    assert "this is a LoRA adapter, not a model" in str(refused.value)
    assert str(refused.value).endswith(command)


@pytest.mark.parametrize("config", ["[]", "{", '{"base_model_name_or_path": null}'])
def test_a_broken_adapter_is_no_model_either(tmp_path: Path, config: str) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ConfigError, match="lora-serve serve ITS_BASE_MODEL --enable-lora"):
        model_path(str(tmp_path), None, with_weights=False)


def test_a_directory_of_gguf_files_is_told_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"name one of them: /.*model\.gguf$"):
        model_path(str(tmp_path), None, with_weights=False)


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="this is a file, but not GGUF; name the directory"):
        model_path(str(tmp_path / "model.safetensors"), None, with_weights=False)
