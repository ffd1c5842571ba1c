"""Adapters that change embeddings and LM head, on interpreted Triton kernels, beside PEFT."""

from __future__ import annotations

from pathlib import Path

import torch

from lora_serve.ops.select import choose_ops
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import ONE_LAYER
from tests.worker.test_adapter_vocabulary import KINDS

TOKENS = [33, 5, 14, 3, 77, 0, 5, 90]


def test_logits_are_those_of_peft_alone_and_in_a_batch(model_path: Path, tmp_path: Path) -> None:
    ops = choose_ops(("all=triton",), torch.device("cpu"), batch_invariant=True)
    model = BareModel(model_path, ops, torch.float32)
    prompts, alone = [], []
    for seed, kind in enumerate(("lora", "tokens", "copy of the head")):
        peft = make_peft(ONE_LAYER, seed, **KINDS[kind])
        checkpoint = read_saved(peft, tmp_path / kind, model.spec, model.vocabulary)
        prompts.append(Prompt(TOKENS, [seed], model.add_adapter(checkpoint)))
        alone.append(prompts[-1].alone(model))
        with torch.no_grad():
            expected = peft(torch.tensor([TOKENS])).logits[0]
        torch.testing.assert_close(alone[-1], expected, rtol=1e-4, atol=2e-4)
    model.poison()
    for got, wanted in zip(model.step([p.chunk(0, 8) for p in prompts]), alone, strict=True):
        assert torch.equal(got, wanted)
