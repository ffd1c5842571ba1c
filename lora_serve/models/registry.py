"""Which architectures can be served, and who reads their configs: the one table of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lora_serve.errors import ConfigError
from lora_serve.models.base import ModelSpec
from lora_serve.models.common_config import refuse_quantised
from lora_serve.models.gemma import read_gemma2, read_gemma3, read_gemma3_multimodal
from lora_serve.models.llama import read_llama
from lora_serve.models.mistral import read_mistral
from lora_serve.models.qwen import read_qwen2, read_qwen3
from lora_serve.models.settings import Settings

SpecReader = Callable[[Settings, str], ModelSpec]

ARCHITECTURES: Mapping[str, SpecReader] = {
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3ForConditionalGeneration": read_gemma3_multimodal,
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
}


def read_spec(config: Mapping[str, object], path: str) -> ModelSpec:
    """The model whose config.json, found at `path`, holds `config`.

    What would be computed wrongly is refused by name; keys that do not change the forward pass
    are not looked at.

    Raises:
        ConfigError: listing everything that is missing, malformed or not supported.
    """
    architecture = _architecture(config, path)
    settings = Settings(config)
    refuse_quantised(settings)
    spec = ARCHITECTURES[architecture](settings, architecture)
    if settings.findings:
        raise ConfigError(f"{path}: " + "; ".join(settings.findings))
    return spec


def _architecture(config: Mapping[str, object], path: str) -> str:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise ConfigError(
        f"{path}: architecture {', '.join(map(str, names)) or '(none named)'} is not supported; "
        f"supported are {', '.join(ARCHITECTURES)}"
    )
