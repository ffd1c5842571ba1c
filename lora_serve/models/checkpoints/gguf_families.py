"""The model families of GGUF files: what their tensors are called, and what was done to them.

llama.cpp's converter reorders the rows of Llama's q and k, and adds 1 to Gemma's norms; both are
undone here, so that tensors are what the family's own checkpoints hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
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
_GEMMA_LAYER = MappingProxyType(
    {
        **_LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A value of general.architecture.

    architecture: as config.json names it. layer_names: of a layer's tensors. permutes_qk: whether
    each head's rows of q and k come in the order of pairs (0, 1), not of halves. norm_offset: what
    was added to the weights of norms.
    """

    architecture: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    permutes_qk: bool = False
    norm_offset: float = 0.0

    @property
    def is_gemma(self) -> bool:
        return self.layer_names is _GEMMA_LAYER

    def tensor_name(self, stored: str) -> str:
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


FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "gemma2": GgufFamily("Gemma2ForCausalLM", _GEMMA_LAYER, norm_offset=1.0),
        "gemma3": GgufFamily("Gemma3ForCausalLM", _GEMMA_LAYER, norm_offset=1.0),
        "llama": GgufFamily("LlamaForCausalLM", permutes_qk=True),
        "qwen2": GgufFamily("Qwen2ForCausalLM"),
        "qwen3": GgufFamily("Qwen3ForCausalLM"),
    }
)
