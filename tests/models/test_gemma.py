from __future__ import annotations

import json
import logging
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_fields
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
)

from lora_serve.errors import AdapterFormatError, ConfigError
from lora_serve.layers.rotary import LinearScaling, RopeSpec
from lora_serve.models.gemma import GemmaSpec
from lora_serve.models.registry import read_spec
from lora_serve.models.source import load_spec
from lora_serve.ops.reference import REFERENCE
from lora_serve.prompts import PlacedRows
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import read_saved
from tests.fakes.tiny_models import GEMMA, GEMMA3_ROPE, SIZES, VOCAB_SIZE, save

TOKENS = [(7 * i) % VOCAB_SIZE for i in range(90)]
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 8}


def read(config: dict[str, Any], **changes: Any) -> GemmaSpec:
    spec = read_spec({**config, **changes}, "c.json")
    assert isinstance(spec, GemmaSpec)
    return spec


# ── configs ─────────────────────────────────────────────────────────────────────────────────────


def test_a_silent_gemma_2_config_means_what_its_family_assumes() -> None:
    spec = read(GEMMA2)
    assert spec.windows == (4096, None, 4096, None)
    assert (spec.attention_softcap, spec.final_softcap) == (50.0, 30.0)
    assert (spec.attention_scale, spec.head_size, spec.num_kv_heads) == (1 / 16, 256, 4)
    assert spec.tie_word_embeddings
    assert not spec.qk_norm
    assert spec.max_positions == 8192
    assert spec.rope == spec.windowed_rope == RopeSpec(10000.0)


def test_a_null_cap_is_none() -> None:
    spec = read(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (spec.attention_softcap, spec.final_softcap) == (None, None)


def test_a_silent_gemma_3_config_means_what_its_family_assumes() -> None:
    spec = read(GEMMA3)
    assert spec.windows == (4096,) * 5 + (None, 4096, 4096)
    assert (spec.attention_softcap, spec.final_softcap) == (None, None)
    assert (spec.rope, spec.windowed_rope) == (RopeSpec(1e6), RopeSpec(10000.0))
    assert spec.qk_norm
    assert (spec.max_positions, spec.vocab_size) == (131_072, 262_208)


def test_gemma_3_says_which_layers_have_a_window_in_either_spelling() -> None:
    assert read(GEMMA3, sliding_window_pattern=2, sliding_window=512).windows == (512, None) * 4
    kinds = ["full_attention"] * 7 + ["sliding_attention"]
    assert read(GEMMA3, layer_types=kinds, sliding_window=512).windows == (None,) * 7 + (512,)


@pytest.mark.parametrize(
    "keys",
    [
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ],
    ids=["older", "newer"],
)
def test_gemma_3_has_two_rotary_bases_in_either_spelling(keys: dict[str, Any]) -> None:
    """max_position_embeddings already counts what the scaling adds."""
    spec = read(GEMMA3, **keys)
    assert spec.rope == RopeSpec(5e5, LinearScaling(8.0))
    assert spec.windowed_rope == RopeSpec(2e4)
    assert spec.max_positions == 131_072


@pytest.mark.parametrize(
    ("config", "changes", "told"),
    [
        (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        (GEMMA2, {"sliding_window": None}, "sliding_window must be a number of tokens, is null"),
        (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a positive number"),
        (GEMMA2, {"layer_types": ["sliding_attention"]}, "layer_types names 1 layers of 4"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is not"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported in"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 1e4}}, "for full_attention and sliding_att"),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": {"rope_type": "other"}}},
            "full_attention of type 'other' is not supported",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    config: dict[str, Any], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(config, **changes)
    assert told in str(error.value)


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        read(GEMMA3, use_bidirectional_attention=True, hidden_activation="gelu", head_dim=15)
    assert str(error.value).count(";") >= 2


# ── what is computed ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"final_softcap": None}),
        ("gemma2", {"attention_scale": 32**-0.5}),
        ("gemma2", {"windows": (20, 20, 20)}),
        ("gemma3", {"windows": (None, None, None)}),
        ("gemma3", {"rope": RopeSpec(50000.0)}),
        ("gemma3", {"windowed_rope": RopeSpec(50000.0, LinearScaling(4.0))}),
    ],
)
def test_every_fact_shows_in_the_logits(
    directories: dict[str, Path], family: str, changes: dict[str, Any]
) -> None:
    """So that the comparison with transformers would tell if one were not heeded."""
    prompt = Prompt(TOKENS, range(6))
    with_it = BareModel(directories[family], REFERENCE, torch.float32)
    without = BareModel(
        directories[family],
        REFERENCE,
        torch.float32,
        change_spec=lambda spec: replace(spec, **changes),
    )
    assert (prompt.alone(with_it) - prompt.alone(without)).abs().max() > 1e-2


def test_capped_logits_are_not_screened(directories: dict[str, Path]) -> None:
    """Two that are apart can be equal once capped and rounded; then the first counts."""
    ops = replace(REFERENCE, pack_screen=lambda weight, packed: lambda hidden, _: [0] * len(hidden))
    assert BareModel(directories["gemma2"], ops, torch.float32).model.screened_argmax is None
    assert BareModel(directories["gemma3"], ops, torch.float32).model.screened_argmax is not None


def test_rows_of_prompt_embeds_are_not_scaled_once_more(
    directories: dict[str, Path], tiny_models: dict[str, PreTrainedModel]
) -> None:
    """They are what transformers takes as inputs_embeds: its embedding has scaled them."""
    model = BareModel(directories["gemma3"], REFERENCE, torch.float32)
    prompt = Prompt(TOKENS, range(6))
    expected = prompt.alone(model)
    with torch.no_grad():
        rows = tiny_models["gemma3"].get_input_embeddings()(torch.tensor(TOKENS))
    model.poison()
    placed = PlacedRows(((0, len(TOKENS)),), rows.numpy().tobytes())
    given = replace_fields(prompt.chunk(0, len(TOKENS)), embeds=placed)
    assert torch.equal(model.step([given])[0], expected)


# ── multimodal checkpoints ──────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def multimodal() -> PreTrainedModel:
    text = {**SIZES, **GEMMA, "rope_parameters": GEMMA3_ROPE}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(3)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("shard_size", ["1GB", "50KB"], ids=["single", "sharded"])
def test_of_a_multimodal_checkpoint_the_text_model_is_served(
    multimodal: PreTrainedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    shard_size: str,
) -> None:
    save(multimodal, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").is_file() == (shard_size == "1GB")
    with caplog.at_level(logging.INFO), torch.no_grad():
        expected = multimodal(torch.tensor([TOKENS])).logits[0]
        got = Prompt(TOKENS, range(6)).alone(BareModel(tmp_path, REFERENCE, torch.float32))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert "images are not supported" in caplog.text


def test_a_multimodal_checkpoint_may_name_its_tensors_as_the_model_in_memory_does(
    multimodal: PreTrainedModel, tmp_path: Path
) -> None:
    """Its projections, which adapters change, always have the names of the model in memory."""
    save(multimodal, tmp_path)
    spec = load_spec(tmp_path)
    in_memory = {spec.tensor_name(name) for name in multimodal.state_dict()}
    assert in_memory - {None} == set(spec.tensor_shapes())
    modules = dict(multimodal.named_modules())
    names = [name for linear in spec.linears() for name, _ in linear.projections]
    assert all(name in modules for name in names)


def adapter_of(multimodal: PreTrainedModel, targets: str, directory: Path) -> PeftModel:
    with warnings.catch_warnings():  # peft asks transformers by a name it is about to drop
        warnings.simplefilter("ignore", FutureWarning)
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        peft = get_peft_model(deepcopy(multimodal), config).eval()
    peft.save_pretrained(str(directory))
    return peft


def test_adapters_of_a_multimodal_models_text_are_peft_s(
    multimodal: PreTrainedModel, tmp_path: Path
) -> None:
    model = BareModel(save(multimodal, tmp_path / "model"), REFERENCE, torch.float32)
    targets = r".*language_model.*\.(q_proj|down_proj)"
    peft = adapter_of(multimodal, targets, tmp_path / "adapter")
    adapter = model.add_adapter(read_saved(peft, tmp_path / "adapter", model.spec))
    with torch.no_grad():
        expected = peft(torch.tensor([TOKENS])).logits[0]
    got = Prompt(TOKENS, range(6), adapter).alone(model)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_changes_the_vision_tower_is_refused_by_name(
    multimodal: PreTrainedModel, tmp_path: Path
) -> None:
    model = BareModel(save(multimodal, tmp_path / "model"), REFERENCE, torch.float32)
    peft = adapter_of(multimodal, r".*\.q_proj", tmp_path / "adapter")
    with pytest.raises(AdapterFormatError, match=r"vision_tower\.encoder\.layers\.0"):
        read_saved(peft, tmp_path / "adapter", model.spec)


def test_a_multimodal_config_without_a_text_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": "none"})
    )
    with pytest.raises(ConfigError, match="text_config must be an object, is 'none'"):
        load_spec(tmp_path)
