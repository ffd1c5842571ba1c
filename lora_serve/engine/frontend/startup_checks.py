"""What an engine would refuse, told before any weight is read, and all of it at once.

The engine checks all of this again where it matters; here it costs milliseconds, there it is found
minutes later, after a download or a gigabyte of weights. Reads small files and headers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lora_serve.adapters.checkpoint import CONFIG_NAME, check_adapter
from lora_serve.adapters.location import HubAdapter, download_from_hub, find_adapter
from lora_serve.config import EngineConfig, LoRAConfig, ModelConfig
from lora_serve.config.refusals import Refusals
from lora_serve.errors import AdapterNotFoundError, ConfigError
from lora_serve.kv_tiers.opening import check_tiers
from lora_serve.text.tokenizer_files import check_tokenizer_files


def check_startup(config: EngineConfig) -> None:
    """Refuse what no engine could start with.

    Raises:
        LoraServeError: the one refusal, or a ConfigError with a line for each of several.
    """
    refusals = Refusals()
    lora_modules: Mapping[str, tuple[int, int]] | None = None
    with refusals.noted():
        lora_modules = _check_model(config.model)
    with refusals.noted():
        _check_kernels(config.model)
    with refusals.noted():
        _check_tokenizer(config.model)
    with refusals.noted():
        check_tiers(config.kv_tiers)
    for name, path in config.lora.modules:
        with refusals.noted():
            _check_adapter(name, path, config.lora, lora_modules)
    refusals.raise_noted()


def _check_model(config: ModelConfig) -> Mapping[str, tuple[int, int]]:
    """The shapes of the modules that adapters may change, if the model's config can be served."""
    from lora_serve.models.base import lora_modules  # imports torch
    from lora_serve.models.choices import dtype_name, max_model_len
    from lora_serve.models.source import load_spec, model_directory

    directory = model_directory(
        config.model, config.revision, config.load_format, with_weights=False
    )
    spec = load_spec(directory, config.load_format)
    refusals = Refusals()
    with refusals.noted():
        dtype_name(config.dtype, spec)
    with refusals.noted():
        max_model_len(config.max_model_len, spec)
    refusals.raise_noted()
    return lora_modules(spec.linears())


def _check_tokenizer(config: ModelConfig) -> None:
    if config.tokenizer is not None:
        check_tokenizer_files(config.tokenizer)
    elif Path(config.model).expanduser().is_dir():  # else the model is refused, or on the hub
        check_tokenizer_files(config.model)


def _check_kernels(config: ModelConfig) -> None:
    from lora_serve.ops.select import overridden_group  # imports torch

    refusals = Refusals()
    for override in config.override_op:
        with refusals.noted():
            overridden_group(override)
    refusals.raise_noted()


def _check_adapter(
    name: str, path: str, config: LoRAConfig, lora_modules: Mapping[str, tuple[int, int]] | None
) -> None:
    try:
        found = find_adapter(path, config.lora_allowed_roots)
        check_adapter(
            download_from_hub(found, config.lora_max_download_bytes)
            if isinstance(found, HubAdapter)
            else found,
            lora_modules=lora_modules,
            max_lora_rank=config.max_lora_rank,
            allowed_roots=config.lora_allowed_roots,
        )
    except AdapterNotFoundError as error:
        raise ConfigError(
            f"--lora-modules {name}={path}: {error}; name a directory that holds {CONFIG_NAME}, "
            "or a hub id"
        ) from error
