"""Phi 3 and Phi 4: dense decoders whose checkpoints have q k v, and gate and up, as one tensor."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.decoder_shape import ProjectionNames
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.rope import ROPE_KEYS, rope_key
from lora_serve.models.settings import Settings

_ORIGINAL, _ORIGINAL_CONTEXT = "original_max_position_embeddings", 4096
_PROJECTIONS = ProjectionNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))


def read_phi3(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Phi 3 or Phi 4; faults are among the findings of `settings`."""
    settings = _with_own_rope(settings)
    has_window = settings.get("sliding_window") is not None
    window = settings.integer("sliding_window") if has_window else None
    spec = read_dense(
        settings,
        architecture,
        windows=(window,) * settings.integer("num_hidden_layers"),
        eps=("rms_norm_eps", 1e-5),
        rotary_share=1.0,
    )
    return replace(spec, projections=_PROJECTIONS)


def _with_own_rope(settings: Settings) -> Settings:
    """The config with what the family alone has of rotary positions, as transformers reads it.

    Its scaling is LongRoPE, also where it is called "yarn". The original context stands beside it.
    """
    key = rope_key(settings)
    rope, outer = settings.part(key), settings.get(_ORIGINAL)
    kind = rope.text("rope_type", rope.text("type", "default"))
    inner = rope.get(_ORIGINAL)
    if kind == "default":
        return settings
    if outer is None and inner not in (None, _ORIGINAL_CONTEXT):
        settings.contradict(
            f"{_ORIGINAL} is {str(inner)[:80]} in {key}; it must stand beside it, too, where the "
            f"family's own is {_ORIGINAL_CONTEXT}"
        )
    values: dict[str, object] = {}
    if outer is None and inner is None:
        values[_ORIGINAL] = _ORIGINAL_CONTEXT
    if kind == "yarn":
        ropes = ((each, settings.get(each)) for each in ROPE_KEYS)
        values |= {
            k: {**rope, "rope_type": "longrope"} for k, rope in ropes if isinstance(rope, dict)
        }
    return settings.replaced(**values)
