"""Reads end tokens and default sampling settings from a model's directory.

Knows no tokenizer. A missing file has no settings; a broken one is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import MappingProxyType

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


def end_token_ids(configs: Iterable[dict[str, object]]) -> list[int]:
    """Every `eos_token_id` of the configs, which each name none, one, or a list."""
    found: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and token_id not in found:
                found.append(token_id)
    return found


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
