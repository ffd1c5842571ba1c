"""What the configs of dense families say, and that each of their facts shows in the logits."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.errors import ConfigError
from lora_serve.layers.rotary import (
    HeadOrder,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
    paired_channels,
)
from lora_serve.models.dense import DenseSpec, NormNames
from lora_serve.models.source import load_spec
from lora_serve.ops.reference import REFERENCE
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.tiny_models import VOCAB_SIZE
from tests.models.configs import read

TOKENS = [(7 * i) % VOCAB_SIZE for i in range(90)]


def read_as(family: str, **changes: Any) -> DenseSpec:
    return read(architectures=[f"{family}ForCausalLM"], **changes)


def test_smollm_3_does_not_rotate_every_fourth_layer_or_those_that_it_names() -> None:
    assert read_as("SmolLM3", num_hidden_layers=9).unrotated == (3, 7)
    assert read_as("SmolLM3", no_rope_layers=[0, 1, 0]).unrotated == (0,)
    assert read_as("SmolLM3").rope == RopeSpec(2e6)
    windows = {"use_sliding_window": True, "sliding_window": 512, "num_hidden_layers": 4}
    assert read_as("SmolLM3", **windows).windows == (None, None, None, 512)


def test_a_silent_granite_scales_nothing() -> None:
    spec = read_as("Granite")
    assert spec == replace(read(), architecture="GraniteForCausalLM", attention_scale=1.0)
    assert read_as("Granite", logits_scaling=8).logit_scale == 0.125


def test_granite_4_is_dense_or_a_mixture_and_rotates_where_it_says_so() -> None:
    attention = {"layer_types": ["attention"] * 2, "shared_intermediate_size": 48}
    dense = read_as("GraniteMoeHybrid", num_local_experts=0, **attention)
    assert (dense.intermediate_size, dense.mixture, dense.unrotated) == (48, None, (0, 1))
    newer = {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"}
    mixed = read_as("GraniteMoeHybrid", shared_intermediate_size=48, **newer)
    assert mixed.mixture is not None
    assert (mixed.mixture.shared_size, mixed.unrotated) == (48, ())


def test_olmo_3_has_windows_and_two_rotary_bases_in_either_spelling() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
    older = read_as("Olmo3", num_hidden_layers=4, rope_scaling=yarn, sliding_window=512)
    assert older.windows == (512, 512, 512, None)
    assert isinstance(older.rope.scaling, YarnScaling)
    assert older.windowed_rope == RopeSpec(5e5)
    assert older.max_positions == 2048
    kinds = {
        "full_attention": {**yarn, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
    newer = read_as("Olmo3", num_hidden_layers=4, rope_parameters=kinds, sliding_window=512)
    assert newer == older


def test_part_of_a_head_turns_in_either_spelling() -> None:
    assert read_as("Phi3").rotary_size is None
    assert read_as("Phi3", partial_rotary_factor=0.75).rotary_size == 12
    assert read_as("Phi3", rope_parameters={"partial_rotary_factor": 0.75}).rotary_size == 12
    assert read_as("Glm4", head_dim=16).rotary_size == 8


def test_phis_original_context_may_stand_beside_the_scaling() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    older = read_as(
        "Phi3", original_max_position_embeddings=512, rope_scaling={"type": "su", **factors}
    )
    newer = read_as(
        "Phi3",
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "original_max_position_embeddings": 512,
            **factors,
        },
    )
    assert older == newer
    assert isinstance(older.rope.scaling, LongRopeScaling)
    assert older.rope.scaling.attention_factor == pytest.approx((1 + 2 / 9) ** 0.5)
    assert older.max_positions == 2048
    short, long = (older.rotary_tables(length)[0] for length in (512, 2048))
    assert not torch.equal(short, long)


def test_adapters_change_the_projections_that_a_checkpoint_has() -> None:
    phi, starcoder = read_as("Phi3").layer_linears(1), read_as("Starcoder2").layer_linears(0)
    assert phi.qkv.projections == (("model.layers.1.self_attn.qkv_proj", 192),)
    assert phi.mlp is not None
    assert starcoder.mlp is not None
    assert phi.mlp.into.projections == (("model.layers.1.mlp.gate_up_proj", 192),)
    assert starcoder.mlp.into.projections == (("model.layers.0.mlp.c_fc", 96),)
    assert starcoder.mlp.into.has_bias


def test_command_r7b_rotates_layers_with_a_window_alone() -> None:
    spec = read_as("Cohere2", num_hidden_layers=5, sliding_window=512)
    assert spec.windows == (512, 512, 512, None, 512)
    assert spec.unrotated == (3,)
    assert (spec.logit_scale, spec.tie_word_embeddings) == (0.0625, True)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        (
            "SmolLM3",
            {"no_rope_layers": [1]},
            "no_rope_layers must be a 0 or 1 for each of",
        ),
        ("Granite", {"residual_multiplier": 0}, "residual_multiplier must be a positive number"),
        (
            "GraniteMoeHybrid",
            {"layer_types": ["mamba", "attention"]},
            "layers of mamba carry a recurrent state from token to token",
        ),
        ("GraniteMoeHybrid", {}, "layers of mamba carry a recurrent state"),
        ("GraniteMoeHybrid", {"layer_types": ["attention"]}, "layer_types names 1 layers, not"),
        (
            "GraniteMoeHybrid",
            {"layer_types": ["attention"] * 2, "normalization_function": "layernorm"},
            "normalization_function other than rmsnorm is not supported",
        ),
        ("Olmo2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; silu is"),
        ("Olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "for full_attention and sliding_atten"),
        ("Phi3", {"partial_rotary_factor": 0.2}, "0.2 of heads of 16 is no even number of"),
        ("Phi3", {"partial_rotary_factor": 2}, "2.0 of heads of 16 is no even number of channels"),
        ("Cohere", {"use_qk_norm": 1}, "use_qk_norm must be"),
        ("Starcoder2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; gelu_pytorch"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    family: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_as(family, **changes)
    assert told in str(error.value)


# A fact of a tiny model that is changed, so that its logits must differ.
CHANGED_FACTS: list[tuple[str, dict[str, Any]]] = [
    ("smollm3", {"unrotated": ()}),
    ("granite", {"embedding_scale": None}),
    ("granite", {"attention_scale": None}),
    ("granite", {"residual_scale": None}),
    ("granite", {"logit_scale": None}),
    ("olmo3", {"windowed_rope": None}),
    ("olmo3", {"windows": (None, None)}),
    ("phi3", {"rotary_size": None}),
    ("glm", {"is_interleaved": False}),
    ("cohere", {"layer_norm": False}),
    ("cohere", {"is_interleaved": False}),
    ("cohere", {"is_parallel": False}),
    ("cohere2", {"unrotated": ()}),
    ("starcoder2", {"windows": (None, None)}),
    ("olmo2", {"activation": "gelu_tanh"}),
    ("olmoe-clipped", {"clip_qkv": None}),
]


@pytest.mark.parametrize(("family", "changes"), CHANGED_FACTS)
def test_every_fact_shows_in_the_logits(
    directories: dict[str, Path], family: str, changes: dict[str, Any]
) -> None:
    """So that the comparison with transformers would tell if one were not heeded."""
    prompt = Prompt(TOKENS[:40], range(6))
    with_it = BareModel(directories[family], REFERENCE, torch.float32)
    without = BareModel(
        directories[family],
        REFERENCE,
        torch.float32,
        change_spec=lambda spec: replace(spec, **changes),
    )
    assert (prompt.alone(with_it) - prompt.alone(without)).abs().max() > 1e-2


def test_each_fact_that_a_family_has_of_its_own_is_asked_for_in_the_logits(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that bring tensors: without them the checkpoint's are unexpected."""
    monkeypatch.setattr(DenseSpec, "__post_init__", lambda spec: None)  # also what no model has
    asked = {name for _, changes in CHANGED_FACTS for name in changes}
    asked.add("projections")  # what tensors are called
    unasked = set()
    for family, directory in directories.items():
        spec = load_spec(directory)
        if not isinstance(spec, DenseSpec):
            continue
        for fact in fields(spec):
            if fact.default in (MISSING, getattr(spec, fact.name)) or fact.name in asked:
                continue
            common = replace(spec, **{fact.name: fact.default})
            if common.tensor_shapes() == spec.tensor_shapes():
                unasked.add((family, fact.name))
    assert not unasked, "add a line to CHANGED_FACTS for each"


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("Starcoder2", {"activation": "silu"}, "an MLP without a gate has gelu_tanh, not silu"),
        ("Cohere", {"residual_scale": 0.5}, "parallel layers scale nothing that they add"),
        ("Cohere", {"norms": NormNames()}, "parallel layers have one norm"),
        ("Llama", {"norm_bias": True}, "RMS norms have no bias"),
        ("SmolLM3", {"qk_norm": True, "qk_layer_norm": True}, "q and k have norms of one"),
    ],
)
def test_facts_that_no_layer_heeds_together_are_no_model(
    family: str, changes: dict[str, Any], told: str
) -> None:
    spec = read_as(family)
    with pytest.raises(AssertionError, match=told):
        replace(spec, **changes)


def test_logits_are_screened_where_their_scale_keeps_them_apart(
    directories: dict[str, Path],
) -> None:
    ops = replace(REFERENCE, pack_screen=lambda weight, packed: lambda hidden, _: [0] * len(hidden))

    def is_screened(scale: float, dtype: torch.dtype) -> bool:
        model = BareModel(
            directories["cohere"], ops, dtype, change_spec=lambda s: replace(s, logit_scale=scale)
        ).model
        return model.screened_argmax is not None

    assert is_screened(0.0625, torch.bfloat16)
    assert not is_screened(0.0625, torch.float16)  # small ones have no bits to lose
    assert not is_screened(0.3, torch.bfloat16)


def test_channels_that_turn_together_are_brought_half_a_head_apart() -> None:
    assert paired_channels(8, 8, interleaved=False) == tuple(range(8))
    assert paired_channels(8, 8, interleaved=True) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert paired_channels(8, 4, interleaved=False) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert paired_channels(8, 4, interleaved=True) == (0, 2, 4, 5, 1, 3, 6, 7)
    order = HeadOrder((1, 0), num_heads=2)
    rows = torch.arange(6)[:, None]
    assert order.reorder(rows).flatten().tolist() == [1, 0, 3, 2, 4, 5]
    assert order.reorder(rows[2:], 2).flatten().tolist() == [3, 2, 4, 5]
    assert order.reorder(rows[4:], 4).flatten().tolist() == [4, 5]
