"""Finds the directory or file on this machine that a user's model name means, and its config."""

from __future__ import annotations

import json
import shlex
from difflib import get_close_matches
from pathlib import Path

from lora_serve.config.model import (
    AUTO,
    QUANTIZATIONS,
    RANDOM_WEIGHTS,
    SMOLLM2,
    STORED_QUANTIZATIONS,
)
from lora_serve.errors import ConfigError
from lora_serve.gguf.location import SUFFIX, gguf_file
from lora_serve.models.base import ModelSpec
from lora_serve.models.checkpoints.choose import format_named, format_of, formats_for
from lora_serve.models.registry import read_spec

_CONFIG_FILES = ("*.json",)
ADAPTER_CONFIG = "adapter_config.json"
GGUF_FORMAT = "gguf"
MAX_SHOWN_CHARS, MAX_SHOWN_FILES = 200, 8


def model_path(
    model: str, revision: str | None, load_format: str = AUTO, *, with_weights: bool
) -> Path:
    """The directory or GGUF file `model`, or what was fetched of the hub under that name.

    with_weights: whether the files of the weights are wanted too, in the formats that load_format
    allows.

    Raises:
        ConfigError: when it is neither.
    """
    directory = Path(model).expanduser()
    if model and directory.is_dir():
        _check_holds_model(directory)
        return directory
    if file := gguf_file(model, revision):
        _check_is_gguf(file, load_format)
        return file
    if not model or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ConfigError(
            f"model {model!r} is neither a directory nor a hub id such as org/name"
            + (f"; did you mean {SMOLLM2}?" * _is_nearly(model, SMOLLM2))
            + (f"; there is no {directory.absolute()}, see that it is spelled right" * bool(model))
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    files = {*_CONFIG_FILES}
    if with_weights:
        files.update(*(form.files for form in formats_for(load_format)))
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=sorted(files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {model!r} is not a directory here and could not be fetched from the hub: "
            f"{error}"
        ) from error
    _check_holds_model(Path(found))
    return Path(found)


def _is_nearly(word: str, name: str) -> bool:
    return bool(get_close_matches(word.lower(), [name]))


def _check_holds_model(directory: Path) -> None:
    """Raise ConfigError for a directory that plainly holds something else, and say what to do."""
    if (directory / "config.json").exists():
        return
    if (directory / ADAPTER_CONFIG).exists():
        base = _base_of(directory / ADAPTER_CONFIG) or "ITS_BASE_MODEL"
        raise ConfigError(
            f"model {directory}: this is a LoRA adapter, not a model; serve its base with it: "
            f"lora-serve serve {base} --enable-lora --lora-modules NAME={directory}"
        )
    if files := sorted(directory.glob(f"*{SUFFIX}")):
        raise ConfigError(
            f"model {directory}: this directory holds GGUF files and no config.json; name one of "
            f"them: {', '.join(str(file) for file in files[:MAX_SHOWN_FILES])}"
        )


def _check_is_gguf(file: Path, load_format: str) -> None:
    """Raise ConfigError for a file that is no model, or is not of the format that is asked for."""
    if not format_named(GGUF_FORMAT).recognises(file) and file.suffix.lower() != SUFFIX:
        raise ConfigError(
            f"model {file}: this is a file, but not GGUF; name the directory that holds "
            "config.json and weights"
        )
    if load_format not in (AUTO, GGUF_FORMAT, RANDOM_WEIGHTS):
        raise ConfigError(f"model {file}: this is a GGUF file, not --load-format {load_format}")


def _base_of(adapter_config: Path) -> str | None:
    """What an adapter's config says that it was trained on, if it can be read and says so."""
    try:
        base = json.loads(adapter_config.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return shlex.quote(base[:MAX_SHOWN_CHARS]) if isinstance(base, str) and base else None


def check_quantization(directory: Path, load_format: str, quantization: str | None) -> None:
    """Refuse the name of a method (one of STORED_QUANTIZATIONS) that is not the checkpoint's.

    Raises:
        ConfigError: naming both.
    """
    if quantization not in STORED_QUANTIZATIONS:
        return
    found = format_of(directory, load_format)
    if found is not format_named(quantization.replace("-", "_")):
        raise ConfigError(
            f"--quantization {quantization}: the weights of {directory} are {found.name}; leave "
            f"the flag out, or quantise them as they are loaded: {' or '.join(QUANTIZATIONS)}"
        )


def load_spec(directory: Path, load_format: str = AUTO, model_impl: str = AUTO) -> ModelSpec:
    """The model that a directory's config describes, or a file's header.

    model_impl: as of ModelConfig.

    Raises:
        ConfigError: when it is missing, broken, or describes what is not supported.
    """
    form = format_of(directory, load_format)
    config = form.config(directory)
    path = directory if directory.is_file() else directory / "config.json"
    return read_spec(config, str(path), model_impl)
