"""A model as transformers loads it, and an adapter that PEFT puts into it, on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from lora_serve.adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME, check_has_weights
from lora_serve.adapters.findings import shown
from lora_serve.adapters.strict_json import parse_object
from lora_serve.cli.matching_time import bounded_matching
from lora_serve.errors import AdapterFormatError, AdapterNotFoundError, ConfigError
from lora_serve.memory_bound import bounded_memory

# Settings by which PEFT would import or fetch what they name, and what is told of them.
_REACHES_OUT: Mapping[str, str] = {
    "megatron_config": "Megatron's parallel layers cannot be read; convert them",
    "prompt_tuning_init_state_dict_path": "virtual tokens that lie elsewhere are not read",
    "adapters": "X-LoRA mixes adapters that lie elsewhere; name one of them",
}
# What an adapter may take beside several times the bytes of its file and of the model.
_ROOM_BYTES = 2 * 2**30
_COPIES = 8
_MATCHING_SECONDS = 20.0  # of CPU time, for all patterns on all names of modules


def check_is_adapter(directory: str) -> None:
    """Raise for a directory of which PEFT would read pickles, or ask the hub for what it lacks.

    Raises:
        AdapterNotFoundError: it has no adapter's config.
        AdapterFormatError: its weights are no safetensors.
    """
    if not (Path(directory) / CONFIG_NAME).is_file():
        raise AdapterNotFoundError(f"No adapter found for {directory}: no {CONFIG_NAME}")
    check_has_weights(directory)


def adapter_config(adapter: str) -> Mapping[str, object]:
    """What its config says. Raises AdapterFormatError where that is no JSON object."""
    findings: list[str] = []
    try:
        config = parse_object((Path(adapter) / CONFIG_NAME).read_bytes(), CONFIG_NAME, findings)
    except OSError as error:
        raise AdapterFormatError(adapter, [f"{CONFIG_NAME} cannot be read: {error}"]) from error
    if config is None:
        raise AdapterFormatError(adapter, findings)
    return config


def refuse_activated(adapter: str) -> None:
    """Raise AdapterFormatError for an activated LoRA: no weights act from some token on."""
    config = adapter_config(adapter)
    if config.get("alora_invocation_tokens"):
        told = (
            f"alora_invocation_tokens is {shown(config['alora_invocation_tokens'])}: an activated "
            "LoRA acts from these tokens on, and weights act on all; serve it as it is, with "
            f"--max-lora-rank of at least its r, {shown(config.get('r'))}"
        )
        raise AdapterFormatError(adapter, [told])


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
    _refuse_reaching_out(adapter)
    try:
        with warnings.catch_warnings():  # peft asks transformers by a name it is about to drop
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("error", "Found missing adapter keys")  # it would go on
            with bounded_memory(_most_bytes(base, adapter)), bounded_matching(_MATCHING_SECONDS):
                adapted: PeftModel = PeftModel.from_pretrained(base, adapter)
    except Exception as error:  # whatever a config makes PEFT do
        told = str(error) or type(error).__name__
        raise AdapterFormatError(adapter, [f"cannot be added to {model}: {told}"]) from error
    return adapted


def _refuse_reaching_out(adapter: str) -> None:
    """Raise AdapterFormatError for a config that has PEFT import, or fetch, what it names."""
    config = adapter_config(adapter)
    findings = [f"{name}: {told}" for name, told in _REACHES_OUT.items() if config.get(name)]
    if findings:
        raise AdapterFormatError(adapter, findings)


def _most_bytes(base: PreTrainedModel, adapter: str) -> int:
    """The memory in which an honest adapter is added: its config may ask for any."""
    in_model = sum(each.nbytes for each in base.parameters())
    return _ROOM_BYTES + _COPIES * (in_model + (Path(adapter) / WEIGHTS_NAME).stat().st_size)
