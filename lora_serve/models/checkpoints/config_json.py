"""Reads a directory's config.json, which most formats have."""

from __future__ import annotations

import json
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.regular_file import MAX_JSON_BYTES, read_regular


def quantization_method(directory: Path) -> str | None:
    """How a directory's weights are quantised, as its config calls it; None if it says nothing."""
    try:
        settings = read_config_json(directory).get("quantization_config")
    except ConfigError:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return method if isinstance(method, str) else None


def read_config_json(directory: Path) -> dict[str, object]:
    """The object in it.

    Raises:
        ConfigError: it is missing or broken.
    """
    path = directory / "config.json"
    try:
        config = json.loads(read_regular(path, MAX_JSON_BYTES))
    except FileNotFoundError as error:
        raise ConfigError(
            f"model {directory}: this directory has no config.json; name one that holds a model, "
            "as transformers' save_pretrained writes it"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return config
