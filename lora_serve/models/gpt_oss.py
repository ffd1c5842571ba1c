"""gpt-oss: experts with biases and an activation of their own, sinks, and windows in turns."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.layers.limited_swiglu import SwiGLULimits
from lora_serve.layers.rotary import RopeSpec
from lora_serve.models.common_config import FULL, SLIDING, layer_types, windows_of
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.mixture import ExpertNames
from lora_serve.models.mixture_config import read_mixture
from lora_serve.models.rope import read_max_positions, read_scaling
from lora_serve.models.settings import Settings

_NAMES = ExpertNames(gate="mlp.router", gate_proj="gate_up_proj.even", up_proj="gate_up_proj.odd")
_THETA = 150000.0  # where the config is silent, as all below
_NUM_KV_HEADS = 8
_HEAD_SIZE = 64
_WINDOW = 128
_NUM_EXPERTS = 128
_NUM_CHOSEN = 4
_ALPHA, _LIMIT = 1.702, 7.0
_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a gpt-oss; faults are among the findings of `settings`."""
    num_layers = settings.integer("num_hidden_layers")
    kinds = layer_types(settings, [(SLIDING, FULL)[layer % 2] for layer in range(num_layers)])
    is_open = settings.is_null("sliding_window")
    window = None if is_open else settings.integer("sliding_window", _WINDOW)
    spec = read_dense(
        settings,
        architecture,
        windows=windows_of(kinds, window),
        num_kv_heads=_NUM_KV_HEADS,
        head_size=_HEAD_SIZE,
        eps=("rms_norm_eps", 1e-5),
        default_theta=_THETA,
        ropes=_ropes(settings),
    )
    mixture = read_mixture(
        settings,
        tuple(range(num_layers)),
        num_experts=_NUM_EXPERTS,
        num_chosen=_NUM_CHOSEN,
        among_chosen=True,
        intermediate_size=spec.intermediate_size,
    )
    swiglu = SwiGLULimits(
        settings.number("swiglu_alpha", _ALPHA), settings.number("swiglu_limit", _LIMIT)
    )
    has_bias = settings.flag("attention_bias", True)
    return replace(
        spec,
        qkv_bias=has_bias,
        output_bias=has_bias,
        has_sinks=True,
        mixture=replace(mixture, names=_NAMES, are_joint=True, swiglu=swiglu),
    )


def _ropes(settings: Settings) -> tuple[RopeSpec, RopeSpec] | None:
    """The family's scaling where the config has none."""
    if settings.get("rope_parameters") or settings.get("rope_scaling"):
        return None
    theta = settings.number("rope_theta", _THETA)
    rope = read_scaling(Settings(_ROPE), "rope_parameters", theta, read_max_positions(settings))
    return rope, rope
