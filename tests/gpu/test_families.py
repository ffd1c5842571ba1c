"""Each family on the card against transformers on the CPU, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lora_serve.ops.select import choose_ops
from lora_serve.worker.device import open_device
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import TINY_MODELS, VOCAB_SIZE
from tests.models.conftest import directories, tiny_models

__all__ = ["directories", "tiny_models"]

pytestmark = pytest.mark.gpu
TOKENS = [(7 * i) % VOCAB_SIZE for i in range(90)]


def on_card(directory: Path, *, batch_invariant: bool) -> BareModel:
    device = open_device("cuda")
    ops = choose_ops((), device.torch_device, batch_invariant)
    return BareModel(directory, ops, torch.float32, device=device)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["library", "invariant"])
@pytest.mark.parametrize("family", TINY_MODELS)
def test_logits_are_those_of_transformers(
    directories: dict[str, Path],
    tiny_models: dict[str, PreTrainedModel],
    family: str,
    batch_invariant: bool,
) -> None:
    with torch.no_grad():
        expected = tiny_models[family](torch.tensor([TOKENS])).logits[0]
    model = on_card(directories[family], batch_invariant=batch_invariant)
    for chunk in (90, 17):
        got = Prompt(TOKENS, range(9, 3, -1)).alone(model, chunk).cpu()
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_adapters_logits_are_those_of_peft(
    directories: dict[str, Path], tmp_path: Path, family: str
) -> None:
    peft = make_peft(family, seed=1, r=13)
    model = on_card(directories[family], batch_invariant=True)
    adapter = model.add_adapter(read_saved(peft, tmp_path, model.spec))
    with torch.no_grad():
        expected = peft(torch.tensor([TOKENS])).logits[0]
    got = Prompt(TOKENS, range(6), adapter).alone(model).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
