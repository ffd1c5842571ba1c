"""Every architecture of transformers' AutoModelForCausalLM, with a config that is small."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

# Set where a config has them, whatever they are called.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "dff", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_num_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 24),
    **dict.fromkeys(("num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("global_head_dim", "swa_head_dim", "kv_channels"), 16),
    "rotary_dim": 8,
    "word_embed_proj_dim": 64,
    "is_decoder": True,
}
_EVEN_WITHOUT_DEFAULT = (
    *("head_dim", "n_group", "n_routed_experts", "num_experts_per_tok", "num_key_value_heads"),
    "topk_group",
)
MOST_PARAMETERS = 20_000_000
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def architectures() -> dict[str, str]:
    """The class of each model_type; of several types of one class the text's, or its own."""
    types: dict[str, list[str]] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        types.setdefault(name, []).append(model_type)
    return {max(each, key=lambda one: _likeness(one, name)): name for name, each in types.items()}


def _likeness(model_type: str, name: str) -> tuple[bool, bool]:
    plain = model_type.replace("_", "").replace("-", "")
    return model_type.endswith("_text"), name.replace("_", "").lower().startswith(plain)


def tiny_config(model_type: str) -> PretrainedConfig:
    """The type's own defaults, but small."""
    return _small(CONFIG_MAPPING[model_type]())


def _small(defaults: PretrainedConfig) -> PretrainedConfig:
    named = defaults.to_dict()
    sizes = {key: value for key, value in _SIZES.items() if _has(defaults, key)}
    if "kv_lora_rank" in sizes:  # attention of latent vectors has no groups of heads
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for key in ("layer_types", "mlp_layer_types"):
        kinds = named.get(key)
        if isinstance(kinds, list):
            sizes[key] = [kinds[0], kinds[len(kinds) // 2], kinds[-1]]
    rope = named.get("rope_parameters")
    if isinstance(rope, dict):
        sizes["rope_parameters"] = copy.deepcopy(rope)
    parts = {key: getattr(defaults, key, None) for key in defaults.sub_configs}
    parts = {key: _small(part).to_dict() for key, part in parts.items() if part is not None}
    tokens = {key: 1 for key in _TOKENS if hasattr(defaults, key)}
    return type(defaults)(**{**sizes, **tokens, **parts})


def _has(config: PretrainedConfig, key: str) -> bool:
    """Whether it may be set to what is in _SIZES."""
    if not hasattr(config, key) or isinstance(getattr(type(config), key, None), property):
        return False
    return key in _EVEN_WITHOUT_DEFAULT or getattr(config, key) is not None


def tiny_model(model_type: str) -> Any:
    """A model with random weights, none of them 0 or 1, in float32."""
    config = tiny_config(model_type)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        num_parameters = sum(
            each.numel() for each in model_class(copy.deepcopy(config)).parameters()
        )
    assert num_parameters < MOST_PARAMETERS, f"{num_parameters} parameters"
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model
