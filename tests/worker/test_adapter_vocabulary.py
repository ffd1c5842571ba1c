"""Adapters that change embeddings and LM head: rows, whole copies and LoRA, as PEFT has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.identity import BASE_MODEL
from lora_serve.ops.contract import Ops
from lora_serve.ops.select import available_ops
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import VOCAB_SIZE

BACKENDS = pytest.mark.parametrize("ops", available_ops().values(), ids=lambda ops: ops.name)
TOKENS = [(7 * i) % VOCAB_SIZE for i in range(60)]
SOME = [33, 5, 127, 0, 14]  # of which the prompt has each but 127, and in no order

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "r": 5},
    "lora of both, tied": {
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tokens": {"trainable_token_indices": SOME},
    "tokens of the head": {"trainable_token_indices": {"lm_head": SOME}},
    "other tokens of each": {"trainable_token_indices": {"embed_tokens": SOME, "lm_head": [3, 14]}},
    "copy of the embeddings": {"modules_to_save": ["embed_tokens"]},
    "copy of the head": {"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens"]},
    "only tokens": {"trainable_token_indices": SOME, "target_modules": ["k_proj"]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2"])
def test_logits_are_those_of_peft(
    directories: dict[str, Path], tmp_path: Path, family: str, kind: str
) -> None:
    peft = make_peft(family, seed=1, **KINDS[kind])
    with torch.no_grad():
        expected = peft(torch.tensor([TOKENS])).logits[0]
    for name, ops in available_ops().items():
        model = BareModel(directories[family], ops, torch.float32)
        checkpoint = read_saved(peft, tmp_path / name, model.spec, model.vocabulary)
        adapter = model.add_adapter(checkpoint)
        got = Prompt(TOKENS, range(4), adapter).alone(model)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)
        assert not torch.allclose(Prompt(TOKENS, range(4)).alone(model), expected, atol=1e-2)


@BACKENDS
def test_other_adapters_in_the_batch_change_no_bit(
    directories: dict[str, Path], tmp_path: Path, ops: Ops
) -> None:
    """Among them one that leaves the vocabulary as it is, and the base model."""
    model = BareModel(directories["gemma2"], ops, torch.bfloat16)
    kinds = [KINDS["lora"], KINDS["tokens"], KINDS["copy of the embeddings"], {}]
    adapters = []
    for seed, settings in enumerate(kinds):
        saved = make_peft("gemma2", seed, **settings)
        checkpoint = read_saved(saved, tmp_path / str(seed), model.spec, model.vocabulary)
        adapters.append(model.add_adapter(checkpoint))
    prompts = [
        Prompt(TOKENS[i:], range(10 * i, 10 * i + 5), adapter)
        for i, adapter in enumerate([*adapters, BASE_MODEL, adapters[0]])
    ]
    alone = [prompt.alone(model) for prompt in prompts]
    model.poison()
    model.step([prompts[0].chunk(0, 50), prompts[2].chunk(0, 17)])
    chunks = [(50, 60), (0, 59), (17, 58), (0, 57), (0, 56), (0, 55)]
    mixed = model.step([p.chunk(*chunk) for p, chunk in zip(prompts, chunks, strict=True)])
    for got, expected, (start, _) in zip(mixed, alone, chunks, strict=True):
        assert torch.equal(got, expected[start:])


@BACKENDS
def test_rows_in_several_parts_are_those_of_one_matrix(ops: Ops) -> None:
    """More than the CPU's kernels pack at once, beside steps."""
    weight = torch.randn(70_001, 32).to(torch.bfloat16)
    x = torch.randn(3, 32).to(torch.bfloat16)
    got = ops.linears.linear(x, ops.linears.pack_rows(weight))
    assert torch.equal(got, ops.linears.linear(x, ops.linears.pack_linear(weight, None)))
