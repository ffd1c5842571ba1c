from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.errors import ConfigError
from lora_serve.models.source import load_spec, model_directory


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert model_directory(str(tmp_path), None, with_weights=True) == tmp_path


@pytest.mark.parametrize("model", ["", "./nowhere", "/nowhere/at/all", "name", "a/b/c"])
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a hub id"):
        model_directory(model, None, with_weights=True)


def test_a_hub_id_that_is_none_is_refused_with_the_hubs_reason() -> None:
    with pytest.raises(ConfigError, match="could not be fetched from the hub"):
        model_directory("not valid/a b", None, with_weights=False)


@pytest.mark.parametrize(
    ("content", "told"), [("{", "is not JSON"), ("[]", "no JSON object"), ("\x80", "is not JSON")]
)
def test_a_broken_config_is_refused(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=told):
        load_spec(tmp_path)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_spec(tmp_path)
