"""Which architectures can be served, and who reads their configs: the one table of families.

What is not in it is read by the door for all others, transformers_backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from lora_serve.config.model import AUTO, OWN_IMPL, TRANSFORMERS_IMPL
from lora_serve.errors import ConfigError
from lora_serve.models.base import ModelSpec
from lora_serve.models.cohere import read_cohere, read_cohere2
from lora_serve.models.common_config import refuse_quantised
from lora_serve.models.gemma import read_gemma2, read_gemma3, read_gemma3_multimodal
from lora_serve.models.glm import read_glm, read_glm4
from lora_serve.models.gpt_oss import read_gpt_oss
from lora_serve.models.granite import (
    read_granite,
    read_granite_hybrid,
    read_granite_moe,
    read_granite_moe_shared,
)
from lora_serve.models.llama import read_llama
from lora_serve.models.mistral import read_mistral
from lora_serve.models.mixtral import read_mixtral
from lora_serve.models.olmo import read_olmo2, read_olmo3, read_olmoe
from lora_serve.models.phi import read_phi3
from lora_serve.models.qwen import read_qwen2, read_qwen3
from lora_serve.models.qwen_moe import read_qwen2_moe, read_qwen3_moe
from lora_serve.models.settings import Contradiction, Settings
from lora_serve.models.smollm import read_smollm3
from lora_serve.models.starcoder import read_starcoder2

# What takes memory for each before a tensor is looked for; real models have a tenth at most, and in
# all of their layers together 23,000 experts. GPT-Neo counts its layers in a list of their types.
_MOST_LAYERS_AND_EXPERTS = 4096
_MOST_EXPERTS_OF_ALL_LAYERS = 2**18
_LAYERS, _EXPERTS = ("layer", "layers", "blocks", "attention_types"), ("experts",)

SpecReader = Callable[[Settings, str], ModelSpec]

# With the model_type that configs of the architecture have.
ARCHITECTURES: Mapping[str, tuple[SpecReader, str]] = {
    "Cohere2ForCausalLM": (read_cohere2, "cohere2"),
    "CohereForCausalLM": (read_cohere, "cohere"),
    "Gemma2ForCausalLM": (read_gemma2, "gemma2"),
    "Gemma3ForCausalLM": (read_gemma3, "gemma3_text"),
    "Gemma3ForConditionalGeneration": (read_gemma3_multimodal, "gemma3"),
    "Glm4ForCausalLM": (read_glm4, "glm4"),
    "GlmForCausalLM": (read_glm, "glm"),
    "GptOssForCausalLM": (read_gpt_oss, "gpt_oss"),
    "GraniteForCausalLM": (read_granite, "granite"),
    "GraniteMoeForCausalLM": (read_granite_moe, "granitemoe"),
    "GraniteMoeHybridForCausalLM": (read_granite_hybrid, "granitemoehybrid"),
    "GraniteMoeSharedForCausalLM": (read_granite_moe_shared, "granitemoeshared"),
    "LlamaForCausalLM": (read_llama, "llama"),
    "MistralForCausalLM": (read_mistral, "mistral"),
    "MixtralForCausalLM": (read_mixtral, "mixtral"),
    "Olmo2ForCausalLM": (read_olmo2, "olmo2"),
    "Olmo3ForCausalLM": (read_olmo3, "olmo3"),
    "OlmoeForCausalLM": (read_olmoe, "olmoe"),
    "Phi3ForCausalLM": (read_phi3, "phi3"),
    "Qwen2ForCausalLM": (read_qwen2, "qwen2"),
    "Qwen2MoeForCausalLM": (read_qwen2_moe, "qwen2_moe"),
    "Qwen3ForCausalLM": (read_qwen3, "qwen3"),
    "Qwen3MoeForCausalLM": (read_qwen3_moe, "qwen3_moe"),
    "SmolLM3ForCausalLM": (read_smollm3, "smollm3"),
    "Starcoder2ForCausalLM": (read_starcoder2, "starcoder2"),
}


def read_spec(config: Mapping[str, object], path: str, model_impl: str = AUTO) -> ModelSpec:
    """The model whose config.json, found at `path`, holds `config`.

    model_impl: as of ModelConfig.

    What would be computed wrongly is refused by name; keys that do not change the forward pass
    are not looked at.

    Raises:
        ConfigError: listing everything that is missing, malformed or not supported.
    """
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    known = (name for name in names if isinstance(name, str) and name in ARCHITECTURES)
    own = None if model_impl == TRANSFORMERS_IMPL else next(known, None)
    settings = Settings(config)
    _check_counts(config, path)
    refuse_quantised(settings)
    spec: ModelSpec | None
    if own is not None:
        read, model_type = ARCHITECTURES[own]
        _check_model_type(settings, own, model_type)
        spec = read(settings, own)
    elif model_impl == OWN_IMPL or not names or not isinstance(names[0], str):
        raise ConfigError(
            f"{path}: architecture {', '.join(map(str, names)) or '(none named)'} is not supported"
            + f" by --model-impl {OWN_IMPL}" * (model_impl == OWN_IMPL)
            + f"; supported are {', '.join(ARCHITECTURES)}"
        )
    else:
        # Imports transformers' models, which those of our own do not need.
        from lora_serve.models.transformers_backend.reading import read_transformers

        spec = read_transformers(config, names[0], settings)
    if settings.findings or spec is None:
        is_meant = not any(isinstance(each, Contradiction) for each in settings.findings)
        is_other_able = own is not None and is_meant and _has_transformers_spec(config, own)
        hint = f"; --model-impl {TRANSFORMERS_IMPL} can run it" * is_other_able
        raise ConfigError(f"{path}: " + "; ".join(settings.findings) + hint)
    return spec


def _check_model_type(settings: Settings, architecture: str, expected: str) -> None:
    """Refuse the model_type of another family: transformers goes by it, and not by the name."""
    stated = settings.get("model_type")
    if stated != expected and any(stated == other for _, other in ARCHITECTURES.values()):
        settings.contradict(
            f"model_type is {stated!r}, and architectures names {architecture}, whose model_type "
            f"is {expected!r}; correct the one that is wrong"
        )


def _has_transformers_spec(config: Mapping[str, object], architecture: str) -> bool:
    """Whether transformers' modules can run what a family of our own refuses."""
    if config.get("model_type") is None:  # as in GGUF files
        return False
    from lora_serve.models.transformers_backend.reading import read_transformers

    settings = Settings(config)
    refuse_quantised(settings)
    return read_transformers(config, architecture, settings) is not None and not settings.findings


def _check_counts(config: Mapping[str, object], path: str) -> None:
    """Raise ConfigError for more layers or experts than any model has, in any part of a config."""
    layers, experts = (list(_counts(config, ends)) for ends in (_LAYERS, _EXPERTS))
    key, count = max(layers + experts, key=_by_count, default=("", 0))
    if count > _MOST_LAYERS_AND_EXPERTS:
        raise ConfigError(
            f"{path}: {key} is {str(count)[:20]}, the most is {_MOST_LAYERS_AND_EXPERTS}"
        )
    most_layers, most_experts = (max(map(_by_count, each), default=1) for each in (layers, experts))
    if most_layers * most_experts > _MOST_EXPERTS_OF_ALL_LAYERS:
        raise ConfigError(
            f"{path}: {most_layers} layers of {most_experts} experts are more than "
            f"{_MOST_EXPERTS_OF_ALL_LAYERS} experts in all"
        )


def _counts(config: Mapping[str, object], ends: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """The whole numbers below keys that end so, at any depth, each with its key."""
    left: list[tuple[str, object]] = list(config.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(key, below) for below in value]
        elif isinstance(value, int) and key.endswith(ends):
            yield key, value


def _by_count(found: tuple[str, int]) -> int:
    return found[1]
