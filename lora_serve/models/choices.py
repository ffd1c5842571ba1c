"""What a user chose for a model, checked against the model's facts."""

from __future__ import annotations

from lora_serve.errors import ConfigError
from lora_serve.models.base import ModelSpec

MODEL_DTYPES = ("float32", "bfloat16", "float16")


def dtype_name(setting: str, spec: ModelSpec) -> str:
    """The name of the type to compute in, one of MODEL_DTYPES.

    Raises:
        ConfigError: the checkpoint's own type is none of them.
    """
    name = (spec.dtype or "float32") if setting == "auto" else setting
    if name not in MODEL_DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype {name} is not supported; set --dtype to one of "
            f"{', '.join(MODEL_DTYPES)}"
        )
    return name


def max_model_len(setting: int | None, spec: ModelSpec) -> int:
    """The longest prompt and answer together, in tokens.

    Raises:
        ConfigError: --max-model-len is above what the model has positions for.
    """
    if setting is None:
        return spec.max_positions
    if setting > spec.max_positions:
        raise ConfigError(
            f"--max-model-len {setting} is above the {spec.max_positions} positions of the model; "
            "lower it"
        )
    return setting


def check_draft_vocabulary(draft_model: str, spec: ModelSpec, served: ModelSpec) -> None:
    """Refuse a draft model that has another number of tokens than the model that is served.

    Raises:
        ConfigError: with both numbers.
    """
    if spec.vocab_size != served.vocab_size:
        raise ConfigError(
            f"--speculative-config: the draft model {draft_model} has a vocabulary of "
            f"{spec.vocab_size} tokens, and the model that is served one of {served.vocab_size}; "
            "choose a draft model with the same tokenizer"
        )
