"""Reads end tokens and default sampling settings from a model's directory.

Knows no tokenizer. A missing file has no settings; a broken one is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard

from lora_serve.errors import ConfigError
from lora_serve.regular_file import MAX_JSON_BYTES, read_regular
from lora_serve.text.model_files import model_file

# generation_config.json's names, and SamplingParams' names for the same settings
_SAMPLING_FIELDS = MappingProxyType(
    {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Ids without duplicates; and what users must know of those that can be none."""

    ids: tuple[int, ...]
    warnings: tuple[str, ...]


def read_model_json(source: str, revision: str | None, filename: str) -> dict[str, object]:
    """The JSON object in a file of a model directory or hub repository; {} if it has none.

    Raises:
        ConfigError: the file is no JSON object.
    """
    content = read_json_file(source, revision, filename)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{filename} of {source} must hold a JSON object, not a {type(content).__name__}"
        )
    return content


def read_json_file(source: str, revision: str | None, filename: str) -> object:
    """What a file of a model directory or hub repository holds; None if there is no such file.

    Raises:
        ConfigError: the file is no JSON.
    """
    path = model_file(source, revision, filename)
    if path is None:
        return None
    try:
        content: object = json.loads(read_regular(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return content


def end_token_ids(configs: Mapping[str, dict[str, object]], size: int) -> EndTokens:
    """Every `eos_token_id` of the configs, by their names, which each name none, one, or a list.

    size: how many tokens the model has.
    """
    found: dict[int, None] = {}
    warnings: list[str] = []
    for name, config in configs.items():
        value = config.get("eos_token_id")
        told = value if isinstance(value, list) else [value]
        found |= dict.fromkeys(each for each in told if _is_token(each, size))
        wrong = [each for each in told if each is not None and not _is_token(each, size)]
        if wrong:
            warnings.append(
                f"{name}: eos_token_id {repr(wrong[0])[:80]} is none of the model's {size:,} "
                "tokens, so no answer ends by it; correct the file"
            )
    return EndTokens(tuple(found), tuple(warnings))


def _is_token(value: object, size: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < size


def vocabulary_size(config: Mapping[str, object]) -> int | None:
    """How many tokens a config.json says that the model has; None if it says nothing."""
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, Mapping) else None
        if type(size) is int and size > 0:
            return size
    return None


def sampling_defaults(generation_config: dict[str, object]) -> dict[str, float]:
    """The settings that are set, by SamplingParams' names.

    Raises:
        ConfigError: one is no number.
    """
    defaults: dict[str, float] = {}
    for theirs, ours in _SAMPLING_FIELDS.items():
        value = generation_config.get(theirs)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"generation_config.json: {theirs} must be a number, got {value!r}; correct it, "
                "or ignore the file with --generation-config none"
            )
        defaults[ours] = value
    return defaults
