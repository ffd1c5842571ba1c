"""Whether a directory can hold a tokenizer: a look at its names, without any tokenizer library."""

from __future__ import annotations

from pathlib import Path

from lora_serve.errors import ConfigError

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


def check_tokenizer_files(source: str) -> None:
    """Refuse what check_tokenizer_directory refuses, and a directory without a tokenizer's files.

    Raises:
        ConfigError: naming the directory.
    """
    check_tokenizer_directory(source)
    directory = Path(source).expanduser()
    if not directory.is_dir():
        return
    if not any(path for pattern in _PATTERNS for path in directory.glob(pattern)):
        raise ConfigError(
            f"{source} holds no tokenizer: tokenizer.json is missing; save it there with "
            "transformers' save_pretrained, or name another place with --tokenizer"
        )
