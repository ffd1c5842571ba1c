from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.errors import ConfigError
from lora_serve.text.tokenizer_files import check_tokenizer_files


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"])
def test_a_directory_with_a_tokenizer_passes(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    check_tokenizer_files(str(tmp_path))


def test_a_directory_without_one_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").touch()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"holds no tokenizer: tokenizer\.json is missing"):
        check_tokenizer_files(str(tmp_path))


def test_a_path_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tokenizer at /no/where"):
        check_tokenizer_files("/no/where")


def test_a_hub_id_passes() -> None:
    check_tokenizer_files("organisation/name")
