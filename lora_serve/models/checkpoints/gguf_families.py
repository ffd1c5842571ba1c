"""The model families of GGUF files: what their tensors are called, and what was done to them.

llama.cpp's converter reorders the rows of q and k of Llama and its relatives, adds 1 to Gemma's
norms, and makes one tensor of all experts of a layer. That is undone here, so that tensors are what
the family's own checkpoints hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor

from lora_serve.gguf.header import TensorEntry

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERT = "{}"  # stands for an expert's number
_OUTER = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output_norm.bias": "model.norm.bias",
        "output.weight": "lm_head.weight",
    }
)
_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_OLMO2_LAYER = MappingProxyType(
    {
        **_LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_GEMMA_LAYER = MappingProxyType({**_OLMO2_LAYER, "ffn_norm": "pre_feedforward_layernorm"})
_FUSED_GATE_LAYER = MappingProxyType({**_LAYER, "ffn_up": "mlp.gate_up_proj"})
_GLM4_LAYER = MappingProxyType(
    {
        **_FUSED_GATE_LAYER,
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
)
_PHI3_LAYER = MappingProxyType({**_FUSED_GATE_LAYER, "attn_qkv": "self_attn.qkv_proj"})
_STARCODER2_LAYER = MappingProxyType({**_LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
_MIXTRAL_LAYER = MappingProxyType(
    {
        **_LAYER,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": f"block_sparse_moe.experts.{_EXPERT}.w1",
        "ffn_up_exps": f"block_sparse_moe.experts.{_EXPERT}.w3",
        "ffn_down_exps": f"block_sparse_moe.experts.{_EXPERT}.w2",
    }
)
_MIXTURE_LAYER = MappingProxyType(
    {
        **_LAYER,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": f"mlp.experts.{_EXPERT}.gate_proj",
        "ffn_up_exps": f"mlp.experts.{_EXPERT}.up_proj",
        "ffn_down_exps": f"mlp.experts.{_EXPERT}.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
_GRANITE_MOE_LAYER = MappingProxyType(
    {
        **_LAYER,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": f"block_sparse_moe.experts.{_EXPERT}.gate_proj",
        "ffn_up_exps": f"block_sparse_moe.experts.{_EXPERT}.up_proj",
        "ffn_down_exps": f"block_sparse_moe.experts.{_EXPERT}.down_proj",
    }
)

# Keys of config.json, and of a file behind the architecture's name.
Keys = Mapping[str, str]
_NO_KEYS: Keys = MappingProxyType({})
_WINDOW: Keys = MappingProxyType({"sliding_window": "attention.sliding_window"})
WINDOWED_BASE = "rope_local_base_freq"  # rotary, of layers with a window
_WINDOW_AND_BASE: Keys = MappingProxyType({**_WINDOW, WINDOWED_BASE: "rope.freq_base_swa"})
_GEMMA2_KEYS: Keys = MappingProxyType(
    {
        **_WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
)
_GEMMA3_KEYS: Keys = MappingProxyType({**_GEMMA2_KEYS, **_WINDOW_AND_BASE})
_GRANITE_KEYS: Keys = MappingProxyType(
    {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
)
_COHERE_KEYS: Keys = MappingProxyType({"logit_scale": "logit_scale"})
_COHERE2_KEYS: Keys = MappingProxyType({**_COHERE_KEYS, **_WINDOW})
_MIXTURE_KEYS: Keys = MappingProxyType(
    {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "norm_topk_prob": "expert_weights_norm",
    }
)
_GRANITE_MOE_KEYS: Keys = MappingProxyType({**_MIXTURE_KEYS, **_GRANITE_KEYS})
_RMS_EPS = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_NORM_EPS = "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A value of general.architecture.

    architecture: as config.json names it. layer_names: of a layer's tensors. permutes_qk: whether
    each head's rows of q and k come in the order of pairs (0, 1), not of halves. norm_offset: what
    was added to the weights of norms. keys: those of its config.json that few families have, and
    the file's. eps: likewise, of the norms' eps. stated: what the file does not say. bias_key: says
    in config.json whether attention has biases.
    """

    architecture: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    permutes_qk: bool = False
    norm_offset: float = 0.0
    keys: Keys = field(default_factory=lambda: _NO_KEYS)
    eps: tuple[str, str] = _RMS_EPS
    stated: Mapping[str, object] = field(default_factory=lambda: _NO_KEYS)
    bias_key: str = "attention_bias"

    @property
    def is_gemma(self) -> bool:
        return self.layer_names is _GEMMA_LAYER

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.keys

    def parts(
        self, stored: str, entry: TensorEntry, num_experts: int
    ) -> Iterator[tuple[str, TensorEntry]]:
        """The tensors of the family's own checkpoints that a stored one holds, by their names.

        It is one, but for tensors of all experts; with other than so many experts it stays as it
        is, which no checkpoint has.
        """
        name, shape = self._tensor_name(stored), entry.shape
        if _EXPERT not in name:
            is_gate_of_one = name.endswith("shared_expert_gate.weight") and len(shape) == 1
            yield name, replace(entry, shape=(1, *shape)) if is_gate_of_one else entry
        elif len(shape) != 3 or shape[0] != num_experts:
            yield stored, entry
        else:
            size = (entry.end - entry.begin) // num_experts
            for expert in range(num_experts):
                begin = entry.begin + expert * size
                part = replace(entry, shape=shape[1:], begin=begin, end=begin + size)
                yield name.format(expert), part

    def _tensor_name(self, stored: str) -> str:
        """Its name in the family's own checkpoints; one that is not known stays as it is."""
        block = _BLOCK.fullmatch(stored)
        if block is None:
            return _OUTER.get(stored, stored)
        layer, part, kind = block.groups()
        named = self.layer_names.get(part)
        return stored if named is None else f"model.layers.{layer}.{named}.{kind}"

    def restored(self, name: str, tensor: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
        """The tensor of this name (of the family's own) as it was before llama.cpp converted it."""
        if self.norm_offset and name.endswith("norm.weight"):
            return tensor.float() - self.norm_offset
        if self.permutes_qk and ".self_attn.q_proj." in name:
            return halves_of_pairs(tensor, num_heads)
        if self.permutes_qk and ".self_attn.k_proj." in name:
            return halves_of_pairs(tensor, num_kv_heads)
        return tensor


def halves_of_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows: (0, n/2, 1, n/2 + 1, …) becomes (0, 1, …, n - 1)."""
    pairs = tensor.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


_LAYER_NORM_EPS = ("layer_norm_eps", _NORM_EPS)
FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "cohere2": GgufFamily("Cohere2ForCausalLM", keys=_COHERE2_KEYS, eps=_LAYER_NORM_EPS),
        "command-r": GgufFamily("CohereForCausalLM", keys=_COHERE_KEYS, eps=_LAYER_NORM_EPS),
        "gemma2": GgufFamily("Gemma2ForCausalLM", _GEMMA_LAYER, norm_offset=1.0, keys=_GEMMA2_KEYS),
        "gemma3": GgufFamily("Gemma3ForCausalLM", _GEMMA_LAYER, norm_offset=1.0, keys=_GEMMA3_KEYS),
        "glm4": GgufFamily("Glm4ForCausalLM", _GLM4_LAYER),
        "granite": GgufFamily("GraniteForCausalLM", permutes_qk=True, keys=_GRANITE_KEYS),
        "granitemoe": GgufFamily(
            "GraniteMoeForCausalLM",
            _GRANITE_MOE_LAYER,
            permutes_qk=True,
            keys=_GRANITE_MOE_KEYS,
            stated=MappingProxyType({"experts_apart": True}),
        ),
        "llama": GgufFamily("LlamaForCausalLM", permutes_qk=True),
        "olmo2": GgufFamily("Olmo2ForCausalLM", _OLMO2_LAYER),
        "olmoe": GgufFamily("OlmoeForCausalLM", _MIXTURE_LAYER, keys=_MIXTURE_KEYS),
        "phi3": GgufFamily("Phi3ForCausalLM", _PHI3_LAYER, keys=_WINDOW),
        "qwen2": GgufFamily("Qwen2ForCausalLM"),
        "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", _MIXTURE_LAYER, keys=_MIXTURE_KEYS),
        "qwen3": GgufFamily("Qwen3ForCausalLM"),
        "qwen3moe": GgufFamily(
            "Qwen3MoeForCausalLM",
            _MIXTURE_LAYER,
            keys=_MIXTURE_KEYS,
            stated=MappingProxyType({"norm_topk_prob": True}),
        ),
        "smollm3": GgufFamily("SmolLM3ForCausalLM", permutes_qk=True),
        "starcoder2": GgufFamily(
            "Starcoder2ForCausalLM",
            _STARCODER2_LAYER,
            keys=_WINDOW,
            eps=("norm_epsilon", _NORM_EPS),
            bias_key="use_bias",
        ),
    }
)
# What an architecture's name stands for in files that have this key, and not as 0.
_VARIANTS: Mapping[str, tuple[str, GgufFamily]] = MappingProxyType(
    {
        "llama": (
            "expert_count",
            GgufFamily("MixtralForCausalLM", _MIXTRAL_LAYER, permutes_qk=True, keys=_MIXTURE_KEYS),
        ),
        "olmo2": (
            _WINDOW["sliding_window"],
            GgufFamily("Olmo3ForCausalLM", _OLMO2_LAYER, keys=_WINDOW_AND_BASE),
        ),
    }
)


def family_of(metadata: Mapping[str, object]) -> GgufFamily | None:
    """The family that a file's metadata names; None for one that is not known."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        return None
    if architecture in _VARIANTS:
        key, variant = _VARIANTS[architecture]
        if metadata.get(f"{architecture}.{key}"):
            return variant
    return FAMILIES.get(architecture)
