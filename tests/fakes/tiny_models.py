"""Random models of each family, as transformers saves them, small enough to compute in no time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

VOCAB_SIZE = 128
SIZES: dict[str, int] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}


@dataclass(frozen=True)
class TinyModel:
    """A kind of model: transformers' classes, and what its config says beyond or against SIZES."""

    config_class: type[PretrainedConfig]
    model_class: type[PreTrainedModel]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> PreTrainedModel:
        """Weights large enough that every layer, norm and bias shows in the logits."""
        config = self.config_class(**{**SIZES, **self.options})
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None
        model = self.model_class(config).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centre = 1.0 if "norm" in name else 0.0
                parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=generator))
        return model


DENSE_MODELS = {
    "llama": TinyModel(LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama-bias-yarn": TinyModel(
        LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN_ROPE, "attention_bias": True}
    ),
    "qwen2": TinyModel(Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": TinyModel(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": TinyModel(MistralConfig, MistralForCausalLM, {"sliding_window": 10}),
    "qwen2-windows": TinyModel(
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
}
# Gemmas whose windows, caps and scalings all act within 90 tokens: three layers, the last without
# a window. Heads are not hidden_size / heads wide, and the root of hidden_size is no whole number.
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA = {"hidden_size": 96, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 20}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
GEMMA_MODELS = {
    "gemma2": TinyModel(
        Gemma2Config,
        Gemma2ForCausalLM,
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": TinyModel(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        GEMMA | {"layer_types": LAYER_TYPES, "rope_parameters": GEMMA3_ROPE},
    ),
}
# Other facts of the dense decoder, each of which shows in two layers.
TWO_LAYERS = {"num_hidden_layers": 2}
WINDOW_FIRST = {"layer_types": LAYER_TYPES[1:], "sliding_window": 20} | TWO_LAYERS
OLMO3_ROPE = {
    "full_attention": YARN_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
LONGROPE = {  # over a context that all prompts exceed
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0],
}
GRANITE = {
    "embedding_multiplier": 3.5,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
GRANITE4 = GRANITE | {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 4,
}
SMALL_MODELS = {
    "smollm3": TinyModel(SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layers": [1, 0, 1]}),
    "granite": TinyModel(GraniteConfig, GraniteForCausalLM, GRANITE | TWO_LAYERS),
    "granite4": TinyModel(
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        GRANITE4 | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "olmo2": TinyModel(Olmo2Config, Olmo2ForCausalLM, TWO_LAYERS),
    "olmo3": TinyModel(
        Olmo3Config, Olmo3ForCausalLM, WINDOW_FIRST | {"rope_parameters": OLMO3_ROPE}
    ),
    "phi3": TinyModel(
        Phi3Config, Phi3ForCausalLM, {"partial_rotary_factor": 0.75, "sliding_window": 20}
    ),
    "phi4": TinyModel(
        Phi3Config,
        Phi3ForCausalLM,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16} | TWO_LAYERS,
    ),
    "glm": TinyModel(GlmConfig, GlmForCausalLM, {"head_dim": 16} | TWO_LAYERS),
    "glm4": TinyModel(Glm4Config, Glm4ForCausalLM, {"head_dim": 16} | TWO_LAYERS),
    "cohere": TinyModel(CohereConfig, CohereForCausalLM, {"logit_scale": 0.3} | TWO_LAYERS),
    "cohere-plus": TinyModel(
        CohereConfig, CohereForCausalLM, {"use_qk_norm": True, "logit_scale": 0.3} | TWO_LAYERS
    ),
    "cohere2": TinyModel(Cohere2Config, Cohere2ForCausalLM, WINDOW_FIRST),
    "starcoder2": TinyModel(
        Starcoder2Config, Starcoder2ForCausalLM, {"sliding_window": 20} | TWO_LAYERS
    ),
}
# Of either normalisation of the chosen, and with layers that have no experts.
FEW_EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2} | TWO_LAYERS
MOE = FEW_EXPERTS | {"moe_intermediate_size": 40}
# Whose limit acts on many values; the first layer has a window.
GPT_OSS = {
    "head_dim": 32,
    "sliding_window": 20,
    "swiglu_limit": 0.4,
    "rope_parameters": YARN_ROPE | {"truncate": False},
}
MIXTURES = {
    "mixtral": TinyModel(MixtralConfig, MixtralForCausalLM, FEW_EXPERTS),
    "olmoe": TinyModel(OlmoeConfig, OlmoeForCausalLM, FEW_EXPERTS),
    "olmoe-clipped": TinyModel(OlmoeConfig, OlmoeForCausalLM, FEW_EXPERTS | {"clip_qkv": 0.7}),
    "qwen2-moe": TinyModel(
        Qwen2MoeConfig, Qwen2MoeForCausalLM, MOE | {"shared_expert_intermediate_size": 48}
    ),
    "qwen3-moe": TinyModel(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        MOE | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "gpt-oss": TinyModel(GptOssConfig, GptOssForCausalLM, FEW_EXPERTS | GPT_OSS),
    "granite-moe": TinyModel(GraniteMoeConfig, GraniteMoeForCausalLM, FEW_EXPERTS | GRANITE),
    "granite-moe-shared": TinyModel(
        GraniteMoeSharedConfig,
        GraniteMoeSharedForCausalLM,
        FEW_EXPERTS | GRANITE | {"shared_intermediate_size": 40},
    ),
    "granite4-moe": TinyModel(  # whose positions nothing tells
        GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, FEW_EXPERTS | GRANITE4
    ),
}
SMALL_MODELS |= MIXTURES
TINY_MODELS = DENSE_MODELS | GEMMA_MODELS | SMALL_MODELS


# For kernels that take a second a layer.
ONE_LAYER = "qwen2-one-layer"
FOUR_KV_HEADS = "qwen2-four-kv-heads"  # for four ranks; other sizes are odd ones
GEMMA_TWO_LAYERS = "gemma2-two-layers"  # the first with a window, the second without
EXPERTS_ONE_LAYER = "qwen2-moe-one-layer"
ALL_MODELS = TINY_MODELS | {
    EXPERTS_ONE_LAYER: replace(
        SMALL_MODELS["qwen2-moe"],
        options=SMALL_MODELS["qwen2-moe"].options | {"num_hidden_layers": 1},
    ),
    GEMMA_TWO_LAYERS: replace(
        GEMMA_MODELS["gemma2"],
        options=GEMMA_MODELS["gemma2"].options | {"num_hidden_layers": 2},
    ),
    FOUR_KV_HEADS: TinyModel(
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_size": 128,
            "intermediate_size": 150,
        },
    ),
    ONE_LAYER: TinyModel(
        Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True, "num_hidden_layers": 1}
    ),
}


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory
