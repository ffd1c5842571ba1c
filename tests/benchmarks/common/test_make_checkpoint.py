from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.make_checkpoint import (
    QWEN_0_5B,
    AdapterShape,
    MixtureShape,
    ModelShape,
    ensure_adapters,
    ensure_checkpoint,
)

TINY = ModelShape(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=1200,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(tmp_path_factory.mktemp("bench") / "model", TINY)


def test_the_shape_is_that_of_qwen_2_5_with_half_a_billion_weights() -> None:
    per_layer = sum(outputs * inputs for outputs, inputs in QWEN_0_5B.projections.values())
    biases = 896 + 2 * 128
    norms = 2 * 896
    count = 24 * (per_layer + biases + norms) + 151_936 * 896 + 896
    assert count == 494_032_768  # as its model card's checkpoint has


def test_transformers_loads_the_checkpoint_and_every_weight_is_in_it(model: Path) -> None:
    loaded, report = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert set(report["missing_keys"]) <= {"lm_head.weight"}  # tied
    logits = loaded(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 1200)
    assert torch.isfinite(logits).all()


def test_a_mixture_has_every_weight_that_transformers_wants(tmp_path: Path) -> None:
    tiny = MixtureShape(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=1200,
        num_experts=4,
        num_experts_per_tok=2,
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(
        ensure_checkpoint(tmp_path / "model", tiny), dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert set(report["missing_keys"]) <= {"lm_head.weight"}  # tied
    assert loaded.config.num_experts == 4
    assert torch.isfinite(loaded(torch.tensor([[5, 6, 7]])).logits).all()


def test_the_tokenizer_fills_the_vocabulary_and_gives_back_any_text(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == 1200
    text = "Grüße, 世界! abcd efgh\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer("abcd")["input_ids"]) < 4


def test_all_tokens_but_single_bytes_and_specials_are_ascii(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert all(str(tokenizer.decode([token])).isascii() for token in range(256, 1200))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_load_into_the_model_and_change_what_it_says(model: Path) -> None:
    paths = ensure_adapters(model.parent / "r4", 2, AdapterShape(4), TINY)
    assert list(paths) == ["r4-0", "r4-1"]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    ids = torch.tensor([[5, 6, 7]])
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, paths["r4-0"])
    assert not torch.equal(adapted(ids).logits, plain)
    tensors = load_file(paths["r4-0"] / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 7


def test_an_adapter_may_be_on_some_projections_only(model: Path) -> None:
    paths = ensure_adapters(model.parent / "qv", 1, AdapterShape(2, ("q_proj", "v_proj")), TINY)
    tensors = load_file(paths["qv-0"] / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in tensors} == {"q_proj", "v_proj"}
    assert tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"].shape == (
        32,
        2,
    )


def test_what_is_there_is_kept_and_another_shape_is_written_anew(tmp_path: Path) -> None:
    weights = tmp_path / "a" / "0" / "adapter_model.safetensors"
    ensure_adapters(tmp_path / "a", 1, AdapterShape(2), TINY)
    first, written = weights.read_bytes(), weights.stat().st_mtime_ns
    ensure_adapters(tmp_path / "a", 1, AdapterShape(2), TINY)
    assert weights.stat().st_mtime_ns == written
    ensure_adapters(tmp_path / "a", 1, AdapterShape(3), TINY)
    assert weights.read_bytes() != first


def test_the_same_seed_gives_the_same_bytes_and_each_adapter_others(tmp_path: Path) -> None:
    one = ensure_adapters(tmp_path / "a", 2, AdapterShape(2), TINY)
    other = ensure_adapters(tmp_path / "b", 1, AdapterShape(2), TINY)
    weights = [
        (path / "adapter_model.safetensors").read_bytes()
        for path in (one["a-0"], one["a-1"], other["b-0"])
    ]
    assert weights[0] == weights[2]
    assert weights[0] != weights[1]
