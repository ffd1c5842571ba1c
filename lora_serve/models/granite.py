"""Granite 3 and 4: decoders that scale embeddings, scores, residuals and logits.

Some have a mixture of experts in each layer, and some of these an expert that all rows take. In
Granite 4 that expert is there always, and is all that dense ones have.
"""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.common_config import FULL, RECURRENT_STATE, attention_bias, factor
from lora_serve.models.decoder_shape import ProjectionNames
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.joint_experts import JointExperts
from lora_serve.models.mixture import ExpertNames
from lora_serve.models.mixture_config import read_mixture
from lora_serve.models.settings import Settings

_EXPERTS = JointExperts(
    gate_up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
    outputs_first=True,
    has_biases=False,
)
_NAMES = ExpertNames(
    gate="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    shared="shared_mlp",
    shared_gate=None,
)
_PROJECTIONS = ProjectionNames(
    mlp_in=("shared_mlp.input_linear",), mlp_out="shared_mlp.output_linear"
)
_NUM_EXPERTS = 8  # where the config is silent, as below
_NUM_CHOSEN = 2
_SHARED_SIZE = 1024
_EACH_APART = "experts_apart"  # no key of config.json: GGUF files have a matrix of each expert
_ATTENTION = (FULL, "attention")


def read_granite(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Granite 3; faults are among the findings of `settings`."""
    has_bias = attention_bias(settings)
    windows = (None,) * settings.integer("num_hidden_layers")
    spec = read_dense(settings, architecture, windows=windows)
    return replace(
        spec,
        qkv_bias=has_bias,
        output_bias=has_bias,
        embedding_scale=factor(settings, "embedding_multiplier"),
        attention_scale=settings.number("attention_multiplier", 1.0),
        residual_scale=factor(settings, "residual_multiplier"),
        logit_scale=_inverse(factor(settings, "logits_scaling")),
    )


def read_granite_moe(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Granite 3 of experts; faults are among the findings of `settings`."""
    spec = read_granite(settings, architecture)
    mixture = read_mixture(
        settings,
        tuple(range(spec.num_layers)),
        num_experts=_NUM_EXPERTS,
        num_chosen=_NUM_CHOSEN,
        among_chosen=True,
        intermediate_size=spec.intermediate_size,
    )
    are_joint = not settings.flag(_EACH_APART, False)
    mixture = replace(mixture, names=_NAMES, are_joint=are_joint, joint=_EXPERTS)
    return replace(spec, mixture=mixture, projections=_PROJECTIONS)


def read_granite_moe_shared(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of one that has an expert of all rows, too, unless its size is 0."""
    spec = read_granite_moe(settings, architecture)
    assert spec.mixture is not None, "it has a mixture"
    size = settings.integer("shared_intermediate_size", 0, least=0)
    return replace(spec, mixture=replace(spec.mixture, shared_size=size or None))


def read_granite_hybrid(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Granite 4 whose layers all have attention; others are refused."""
    _refuse_recurrent(settings)
    if settings.text("normalization_function", "rmsnorm") != "rmsnorm":
        settings.refuse("normalization_function other than rmsnorm is not supported")
    size = settings.integer("shared_intermediate_size", _SHARED_SIZE)
    if settings.integer("num_local_experts", _NUM_EXPERTS, least=0):
        spec = read_granite_moe(settings, architecture)
        assert spec.mixture is not None, "it has a mixture"
        spec = replace(spec, mixture=replace(spec.mixture, shared_size=size))
    else:
        spec = read_granite(settings, architecture)
        spec = replace(spec, intermediate_size=size, projections=_PROJECTIONS)
    is_rotated = settings.text("position_embedding_type", "nope") == "rope"
    return spec if is_rotated else replace(spec, unrotated=tuple(range(spec.num_layers)))


def _refuse_recurrent(settings: Settings) -> None:
    """Layers without attention are Mamba's, and all are where the config is silent."""
    stated = settings.get("layer_types") or settings.get("layers_block_type") or ["mamba"]
    kinds = stated if isinstance(stated, list) else [stated]
    recurrent = sorted({str(kind)[:40] for kind in kinds if kind not in _ATTENTION})
    if recurrent:
        settings.refuse(f"layers of {', '.join(recurrent)} {RECURRENT_STATE}")
    elif len(kinds) != settings.integer("num_hidden_layers"):
        settings.refuse(f"layer_types names {len(kinds)} layers, not num_hidden_layers")


def _inverse(divisor: float | None) -> float | None:
    return None if divisor is None else 1 / divisor
