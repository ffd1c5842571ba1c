"""From what the user named as a model to a directory on this machine, and its config."""

from __future__ import annotations

import json
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.models.base import ModelSpec
from lora_serve.models.registry import read_spec

_CONFIG_FILES = ["*.json"]
_WEIGHT_FILES = ["*.safetensors"]


def model_directory(model: str, revision: str | None, *, with_weights: bool) -> Path:
    """The directory `model`, or the local snapshot of the hub repository of that name.

    Raises:
        ConfigError: when it is neither.
    """
    directory = Path(model).expanduser()
    if model and directory.is_dir():
        return directory
    if not model or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ConfigError(f"model {model!r} is neither a directory nor a hub id such as org/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    files = _CONFIG_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {model!r} is not a directory here and could not be fetched from the hub: "
            f"{error}"
        ) from error


def load_spec(directory: Path) -> ModelSpec:
    """The model that the directory's config.json describes.

    Raises:
        ConfigError: when it is missing, broken, or describes what is not supported.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return read_spec(config, str(path))
