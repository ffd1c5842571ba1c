"""Biases of adapters: those that PEFT trains beside LoRA, and those of lora_B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.errors import AdapterFormatError
from lora_serve.identity import BASE_MODEL
from lora_serve.ops.contract import Ops
from lora_serve.ops.select import available_ops
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import VOCAB_SIZE

BACKENDS = pytest.mark.parametrize("ops", available_ops().values(), ids=lambda ops: ops.name)
TOKENS = [(7 * i) % VOCAB_SIZE for i in range(40)]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "o_proj"]}),
    ("qwen2", {"bias": "all", "target_modules": ["o_proj"]}),
    ("llama", {"lora_bias": True, "target_modules": ["k_proj", "down_proj"]}),
    ("qwen2", {"lora_bias": True, "bias": "lora_only", "target_modules": ["v_proj"]}),
    ("glm", {"bias": "all", "lora_bias": True}),
]


@pytest.mark.parametrize(("family", "settings"), KINDS, ids=str)
def test_logits_are_those_of_peft(
    directories: dict[str, Path], tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """GLM's channels are computed in another order than the checkpoint's."""
    peft = make_peft(family, seed=1, **settings)
    with torch.no_grad():
        expected = peft(torch.tensor([TOKENS])).logits[0]
    for name, ops in available_ops().items():
        model = BareModel(directories[family], ops, torch.float32)
        checkpoint = read_saved(peft, tmp_path / name, model.spec)
        assert checkpoint.biases
        got = Prompt(TOKENS, range(4), model.add_adapter(checkpoint)).alone(model)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


def test_biases_that_were_not_trained_add_nothing(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    peft = make_peft("qwen2", 1, bias="all", seeds_biases=False)
    model = BareModel(directories["qwen2"], available_ops()["reference"], torch.bfloat16)
    model.add_adapter(read_saved(peft, tmp_path, model.spec))
    assert not model.adapters.biases


@BACKENDS
def test_other_adapters_in_the_batch_change_no_bit(
    directories: dict[str, Path], tmp_path: Path, ops: Ops
) -> None:
    model = BareModel(directories["qwen2"], ops, torch.bfloat16)
    adapters = [
        model.add_adapter(
            read_saved(make_peft("qwen2", seed, **settings), tmp_path / str(seed), model.spec)
        )
        for seed, settings in enumerate(({"bias": "all"}, {"lora_bias": True}, {}))
    ]
    prompts = [
        Prompt(TOKENS[i:], range(10 * i, 10 * i + 5), adapter)
        for i, adapter in enumerate([*adapters, BASE_MODEL, adapters[0]])
    ]
    alone = [prompt.alone(model) for prompt in prompts]
    assert not torch.equal(alone[0][4:], alone[4])
    model.poison()
    model.step([prompts[1].chunk(0, 20)])
    chunks = [(0, 40), (20, 39), (0, 38), (0, 37), (0, 36)]
    mixed = model.step([p.chunk(*chunk) for p, chunk in zip(prompts, chunks, strict=True)])
    for got, expected, (start, _) in zip(mixed, alone, chunks, strict=True):
        assert torch.equal(got, expected[start:])


def test_biases_of_an_activated_adapter_are_its_own_from_the_invocation_on(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    model = BareModel(directories["qwen2"], available_ops()["reference"], torch.float32)
    tokens = {"task_type": "CAUSAL_LM", "alora_invocation_tokens": [5, 6]}
    with pytest.raises(AdapterFormatError, match="would act before the invocation tokens"):
        read_saved(make_peft("qwen2", 1, bias="all", **tokens), tmp_path, model.spec)
