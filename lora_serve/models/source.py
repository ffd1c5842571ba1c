"""Finds the directory on this machine that a user's model name means, and its config."""

from __future__ import annotations

from pathlib import Path

from lora_serve.config.model import AUTO
from lora_serve.errors import ConfigError
from lora_serve.models.base import ModelSpec
from lora_serve.models.checkpoints.choose import format_of, formats_for
from lora_serve.models.registry import read_spec

_CONFIG_FILES = ("*.json",)


def model_directory(
    model: str, revision: str | None, load_format: str = AUTO, *, with_weights: bool
) -> Path:
    """The directory `model`, or the local snapshot of the hub repository of that name.

    with_weights: whether the files of the weights are wanted too, in the formats that load_format
    allows.

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

    files = {*_CONFIG_FILES}
    if with_weights:
        files.update(*(form.files for form in formats_for(load_format)))
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=sorted(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {model!r} is not a directory here and could not be fetched from the hub: "
            f"{error}"
        ) from error


def load_spec(directory: Path, load_format: str = AUTO) -> ModelSpec:
    """The model that the directory's config describes.

    Raises:
        ConfigError: when it is missing, broken, or describes what is not supported.
    """
    form = format_of(directory, load_format)
    return read_spec(form.config(directory), str(directory / "config.json"))
