"""Whether a directory or file can hold a tokenizer: a look without any tokenizer library."""

from __future__ import annotations

import json
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.gguf.location import gguf_file
from lora_serve.text.gguf_vocabulary import GgufVocabulary

# Without one of these there is nothing by which text could be split.
_PATTERNS = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.spm", "*spiece*.model",
             "sentencepiece*.model", "tekken.json", "*.tiktoken")  # fmt: skip


def check_tokenizer_directory(source: str) -> None:
    """Refuse a path that leads nowhere; anything else may be a hub id.

    Raises:
        ConfigError: naming the path.
    """
    if source.startswith(("/", ".", "~")) and not Path(source).expanduser().is_dir():
        raise ConfigError(
            f"no tokenizer at {source}: there is no such directory; --tokenizer names another place"
        )


def check_tokenizer_files(source: str, revision: str | None = None) -> None:
    """Refuse what check_tokenizer_directory refuses, and a place without a tokenizer.

    Raises:
        ConfigError: naming the directory.
    """
    file = gguf_file(source, revision)
    if file is not None:
        GgufVocabulary(file)
        return
    check_tokenizer_directory(source)
    directory = Path(source).expanduser()
    if not directory.is_dir():
        return
    if not any(path for pattern in _PATTERNS for path in directory.glob(pattern)):
        raise ConfigError(
            f"{source} holds no tokenizer: tokenizer.json is missing; save it there with "
            "transformers' save_pretrained, or name another place with --tokenizer"
        )


def check_same_tokens(draft_model: str, served: str) -> None:
    """Refuse a draft model whose tokenizer.json has other tokens than that of the served model.

    Where one of them has no such file nothing is known, and nothing refused.

    Raises:
        ConfigError: naming both.
    """
    files = [Path(source).expanduser() / "tokenizer.json" for source in (draft_model, served)]
    if not all(file.is_file() for file in files):
        return
    its_own, expected = (file.read_bytes() for file in files)
    if its_own != expected and _tokens(its_own) != _tokens(expected):
        raise ConfigError(
            f"--speculative-config: the tokenizer of the draft model {draft_model} has other "
            f"tokens than that of {served}; choose a draft model with the same tokenizer"
        )


def _tokens(file: bytes) -> object:
    """The vocabulary and what is added to it; None of a file that says neither."""
    try:
        told = json.loads(file)
        added = {token["id"]: token["content"] for token in told.get("added_tokens") or ()}
        return told["model"]["vocab"], added
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
