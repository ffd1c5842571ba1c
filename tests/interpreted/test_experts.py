"""A mixture of experts on interpreted Triton kernels, with a shared expert and an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_serve.ops.contract import Ops
from lora_serve.ops.select import available_ops
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import ALL_MODELS, EXPERTS_ONE_LAYER, VOCAB_SIZE, save

TOKENS = [(7 * i) % VOCAB_SIZE for i in range(18)]


@pytest.fixture(autouse=True)
def silent_overflow() -> Iterator[None]:
    with np.errstate(over="ignore"):
        yield


@pytest.fixture
def triton(interpreted: None) -> Ops:
    return available_ops(batch_invariant=True)["triton"]


def test_logits_are_those_of_peft_and_of_the_prompt_alone(triton: Ops, tmp_path: Path) -> None:
    model = BareModel(
        save(ALL_MODELS[EXPERTS_ONE_LAYER].make(), tmp_path / "model"), triton, torch.float32
    )
    on_experts = ["experts.gate_up_proj", "experts.down_proj"]
    peft = make_peft(EXPERTS_ONE_LAYER, seed=1, target_parameters=on_experts)
    adapter = model.add_adapter(read_saved(peft, tmp_path / "adapter", model.spec))
    with torch.no_grad():
        expected = peft(torch.tensor([TOKENS])).logits[0]
    one, other = Prompt(TOKENS, range(4), adapter), Prompt(TOKENS[5:9], range(10, 14))
    alone = one.alone(model)
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=2e-4)
    model.poison()
    model.step([one.chunk(0, 14)])
    mixed = model.step([other.chunk(0, 4), one.chunk(14, 18)])
    assert torch.equal(mixed[1], alone[14:])
