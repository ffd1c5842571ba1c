"""A model as transformers loads it, and an adapter that PEFT puts into it, on the CPU."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from lora_serve.adapters.checkpoint import CONFIG_NAME
from lora_serve.errors import AdapterFormatError, AdapterNotFoundError, ConfigError


def check_is_adapter(directory: str) -> None:
    """Raise AdapterNotFoundError where no adapter's config is."""
    if not (Path(directory) / CONFIG_NAME).is_file():
        raise AdapterNotFoundError(f"No adapter found for {directory}: no {CONFIG_NAME}")


def load_base(model: str) -> PreTrainedModel:
    """A directory's or a hub id's model, in its own dtype. Raises ConfigError."""
    with told_as_model_error(model):
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", trust_remote_code=False
        )
    return loaded


@contextmanager
def told_as_model_error(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} cannot be read as a model: {error}") from error


def add_adapter(base: PreTrainedModel, adapter: str, model: str) -> PeftModel:
    """Put the adapter of directory `adapter` into `base`, which is changed.

    model: what errors call the base.

    Raises:
        AdapterFormatError: PEFT cannot, or finds less in its files than it needs.
    """
    _refuse_imports(adapter)
    try:
        with warnings.catch_warnings():  # peft asks transformers by a name it is about to drop
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("error", "Found missing adapter keys")  # it would go on
            adapted: PeftModel = PeftModel.from_pretrained(base, adapter)
    except Exception as error:  # whatever a config makes PEFT do
        raise AdapterFormatError(adapter, [f"cannot be added to {model}: {error}"]) from error
    return adapted


def _refuse_imports(adapter: str) -> None:
    """Raise AdapterFormatError for a config that names a module for PEFT to import."""
    try:
        config = json.loads((Path(adapter) / CONFIG_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterFormatError(adapter, [f"{CONFIG_NAME} cannot be read: {error}"]) from error
    if isinstance(config, dict) and config.get("megatron_config"):
        raise AdapterFormatError(
            adapter, ["megatron_config: Megatron's parallel layers cannot be read; convert them"]
        )
