"""GLM 4: dense decoders that turn neighbouring channels, of the first half of each head.

Those of 2025 (Glm4ForCausalLM) have norms behind their parts, too.
"""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.decoder_shape import ProjectionNames
from lora_serve.models.dense import DenseSpec, NormNames
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings

_PROJECTIONS = ProjectionNames(mlp_in=("mlp.gate_up_proj",))
_NORMS_ON_BOTH_SIDES = NormNames(
    after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
)
_NUM_KV_HEADS = 2  # where the config is silent, as the three below
_HEAD_SIZE = 128
_ROTARY_SHARE = 0.5
_EPS = 1.5625e-07


def read_glm(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a GLM 4 of 2024; faults are among the findings of `settings`."""
    spec = read_dense(
        settings,
        architecture,
        windows=(None,) * settings.integer("num_hidden_layers"),
        num_kv_heads=_NUM_KV_HEADS,
        head_size=_HEAD_SIZE,
        eps=("rms_norm_eps", _EPS),
        rotary_share=_ROTARY_SHARE,
    )
    return replace(
        spec,
        qkv_bias=settings.flag("attention_bias", True),
        projections=_PROJECTIONS,
        is_interleaved=True,
    )


def read_glm4(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a GLM 4 of 2025; faults are among the findings of `settings`."""
    return replace(read_glm(settings, architecture), norms=_NORMS_ON_BOTH_SIDES)
