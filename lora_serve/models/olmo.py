"""OLMo 2 and 3, and OLMoE: decoders with norms over all heads of q and of k.

OLMo 2 and 3 have norms behind their parts; OLMoE has experts.
"""

from __future__ import annotations

from dataclasses import replace

from lora_serve.layers.rotary import RopeSpec
from lora_serve.models.common_config import FULL, SLIDING, attention_bias, layer_types, windows_of
from lora_serve.models.dense import DenseSpec, NormNames
from lora_serve.models.dense_config import read_dense
from lora_serve.models.mixture_config import read_mixture
from lora_serve.models.rope import read_max_positions, read_ropes_by_kind
from lora_serve.models.settings import Settings

_NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_EPS = ("rms_norm_eps", 1e-5)
_OLMO3_WINDOW = 4096  # where the config is silent, as the two below
_OLMO3_FULL_PERIOD = 4
_OLMO3_THETA = 500_000.0
_OLMOE_NUM_EXPERTS = 64
_OLMOE_NUM_CHOSEN = 8


def read_olmo2(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of an OLMo 2; faults are among the findings of `settings`."""
    windows = (None,) * settings.integer("num_hidden_layers")
    return _read(settings, architecture, windows, None)


def read_olmo3(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of an OLMo 3; faults are among the findings of `settings`."""
    layers = range(settings.integer("num_hidden_layers"))
    default = [FULL if (layer + 1) % _OLMO3_FULL_PERIOD == 0 else SLIDING for layer in layers]
    kinds = layer_types(settings, default)
    if settings.is_null("sliding_window"):
        settings.refuse("sliding_window must be a number of tokens, is null")
    windows = windows_of(kinds, settings.integer("sliding_window", _OLMO3_WINDOW))
    ropes = read_ropes_by_kind(
        settings,
        read_max_positions(settings),
        default_theta=_OLMO3_THETA,
        windowed_key="rope_theta",
        default_windowed_theta=_OLMO3_THETA,
    )
    return _read(settings, architecture, windows, ropes)


def read_olmoe(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of an OLMoE; faults are among the findings of `settings`."""
    layers = range(settings.integer("num_hidden_layers"))
    spec = _read(settings, architecture, (None,) * len(layers), None)
    mixture = read_mixture(
        settings,
        tuple(layers),
        num_experts=_OLMOE_NUM_EXPERTS,
        num_chosen=_OLMOE_NUM_CHOSEN,
        intermediate_size=spec.intermediate_size,
    )
    clip = settings.optional_number("clip_qkv", None)
    return replace(spec, norms=NormNames(), mixture=mixture, clip_qkv=clip)


def _read(
    settings: Settings,
    architecture: str,
    windows: tuple[int | None, ...],
    ropes: tuple[RopeSpec, RopeSpec] | None,
) -> DenseSpec:
    has_bias = attention_bias(settings)
    spec = read_dense(settings, architecture, windows=windows, eps=_EPS, ropes=ropes)
    return replace(
        spec,
        qkv_bias=has_bias,
        output_bias=has_bias,
        norms=_NORMS,
        qk_norm_of_all_heads=True,
    )
