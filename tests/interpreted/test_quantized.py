"""A mixture of experts over codes on interpreted Triton kernels, with an adapter on top."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_serve.ops.contract import Ops
from lora_serve.ops.quantization import INT4, Quantization
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import available_ops, quantize_linears
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.quantized_checkpoints import gptq, save_quantized
from tests.fakes.tiny_models import ALL_MODELS, EXPERTS_ONE_LAYER, VOCAB_SIZE, save

TOKENS = [(7 * i) % VOCAB_SIZE for i in range(18)]


@pytest.fixture(autouse=True)
def silent_overflow() -> Iterator[None]:
    with np.errstate(over="ignore"):
        yield


@pytest.mark.parametrize(
    ("how", "name"), [("--quantization", EXPERTS_ONE_LAYER), ("stored codes", "olmoe")]
)
def test_logits_are_the_references_and_those_of_the_prompt_alone(
    interpreted: None, tmp_path: Path, how: str, name: str
) -> None:
    """They are equal to a rounding and to the bit; the reference has the same codes."""
    backends: list[Ops] = [available_ops(batch_invariant=True)["triton"], REFERENCE]
    model, path = ALL_MODELS[name].make(), tmp_path / "model"
    if how == "--quantization":
        save(model, path)
        backends = [quantize_linears(ops, Quantization(INT4)) for ops in backends]
    else:
        save_quantized(model, path, gptq(4, 32))
    ours, theirs = (
        BareModel(path, ops, torch.float32, keeps_codes=how == "stored codes") for ops in backends
    )
    assert any(".experts." in name for name in ours.kept_codes) == (how == "stored codes")
    checkpoint = read_saved(make_peft(name, seed=1), tmp_path / "adapter", ours.spec)
    one = Prompt(TOKENS, range(4), ours.add_adapter(checkpoint))
    theirs.add_adapter(checkpoint)
    alone = one.alone(ours)
    torch.testing.assert_close(alone, one.alone(theirs), atol=2e-4, rtol=0)
    ours.poison()
    ours.step([one.chunk(0, 14)])
    other = Prompt(TOKENS[5:9], range(10, 14))
    mixed = ours.step([other.chunk(0, 4), one.chunk(14, 18)])
    assert torch.equal(mixed[1], alone[14:])
