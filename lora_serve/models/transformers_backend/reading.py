"""Finds the class of transformers for a config.json, what it computes, and its tensors.

Only classes that transformers itself has are looked at: no code of a checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._meta_registrations  # modules without weights ask these rules

from lora_serve.memory_bound import bounded_memory
from lora_serve.models.common_config import stored_dtype
from lora_serve.models.rope import MOST_POSITIONS
from lora_serve.models.settings import Settings
from lora_serve.models.transformers_backend.interfaces import NAME, register
from lora_serve.models.transformers_backend.obstacles import cross_attention, obstacle
from lora_serve.models.transformers_backend.spec import TransformersSpec
from lora_serve.models.transformers_backend.tracing import trace

# What a config may take, and the modules of it without weights: those of 400 layers are some MiB.
_MOST_BYTES = 4 * 2**30
# With any key that has "implementation" in it.
_WHO_COMPUTES = frozenset(("auto_map", "fusion_config", "kernel_config"))


def read_transformers(
    values: Mapping[str, object], architecture: str, settings: Settings
) -> TransformersSpec | None:
    """The model that a config describes; None with `settings` saying why it cannot be served.

    values: the config as it stands. architecture: that it names first.
    """
    with bounded_memory(_MOST_BYTES):
        return _read(values, architecture, settings)


def _read(
    values: Mapping[str, object], architecture: str, settings: Settings
) -> TransformersSpec | None:
    config = _read_config(values, settings)
    model_class = None if config is None else _class_of(config, architecture, settings)
    if config is None or model_class is None:
        return None
    why = obstacle(config, model_class)
    if why is not None:
        _refuse(settings, architecture, why)
        return None
    max_positions = _max_positions(config, settings)
    dtype = stored_dtype(settings)
    register()
    try:
        model = _without_weights(model_class, config, dtype)
    except Exception as error:  # whatever its constructor raises
        own = isinstance(error, KeyError) and error.args == (NAME,)
        why = "its attention takes no other implementation" if own else _short(error)
        _refuse(settings, architecture, why)
        return None
    why = cross_attention(model)
    if why is not None:
        _refuse(settings, architecture, why)
        return None
    found = trace(model)
    if found.findings:
        _refuse(settings, architecture, ", and ".join(found.findings))
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return TransformersSpec(
        model_class=model_class,
        config=config,
        found=found,
        shapes=_stored_shapes(model, tied, settings),
        prefix=str(model.base_model_prefix),
        tied=tied,
        ignored=tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        max_positions=max_positions,
        dtype=dtype,
    )


def _max_positions(config: Any, settings: Settings) -> int:
    """How many positions the model has; 1, and a refusal, if the config does not say it."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(found, int) and 1 <= found <= MOST_POSITIONS:
        return found
    settings.refuse(
        f"max_position_embeddings must be from 1 to {MOST_POSITIONS}, is {str(found)[:20]}"
    )
    return 1


def _without_weights(model_class: Any, config: Any, dtype: str | None) -> Any:
    """The modules of a model on no device, with our attention and experts."""
    with torch.device("meta"):
        return model_class._from_config(
            config,
            dtype=getattr(torch, dtype or "float32", torch.float32),
            attn_implementation=NAME,
            experts_implementation=NAME,
        ).eval()


def _refuse(settings: Settings, architecture: str, why: str) -> None:
    settings.refuse(f"{architecture} cannot be served by --model-impl transformers: {why}")


def _read_config(values: Mapping[str, object], settings: Settings) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        settings.refuse(
            f"transformers {transformers.__version__} has no model_type {model_type!r}, and code "
            "of checkpoints is never run"
        )
        return None
    try:
        return CONFIG_MAPPING[model_type].from_dict(_plain(values))
    except Exception as error:  # whatever its checks raise
        settings.refuse(f"transformers cannot read it: {_short(error)}")
        return None


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """A config without what says who computes: a checkpoint could name kernels of the hub."""
    return {
        key: _plain_value(value)
        for key, value in values.items()
        if key not in _WHO_COMPUTES and "implementation" not in key
    }


def _plain_value(value: object) -> object:
    if isinstance(value, list):
        return [_plain_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    # As transformers writes what JSON has no numbers for.
    return float(value["__float__"]) if value.keys() == {"__float__"} else _plain(value)


def _class_of(config: Any, architecture: str, settings: Settings) -> Any:
    """The class of transformers for generation of that name."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None or found.__name__ != architecture:
        settings.refuse(
            f"architecture {architecture} is not among those of transformers' AutoModelForCausalLM"
        )
        return None
    return found


def _stored_shapes(
    model: Any, tied: Mapping[str, str], settings: Settings
) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors as checkpoints store them, by transformers' own conversions."""
    from transformers.core_model_loading import revert_weight_conversion

    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) | tied.keys()
    state = {name: each for name, each in model.state_dict().items() if name not in unsaved}
    for name, each in state.items():
        if not each.is_floating_point():
            settings.refuse(f"its tensor {name} is {each.dtype}, not of floats")
    stored = revert_weight_conversion(model, state)
    return {name: tuple(each.shape) for name, each in stored.items()}


def _short(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {_MOST_BYTES} bytes of memory, without weights"
    return f"{type(error).__name__}: {str(error)[:160]}"
