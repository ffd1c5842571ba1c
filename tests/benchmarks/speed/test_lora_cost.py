"""What is compared must differ in the adapters, and in nothing else."""

import pytest
import torch
from torch import Tensor

from benchmarks.speed.lora_cost import (
    DECODE_8,
    DECODE_8_OF_1,
    DECODE_8_OF_8,
    PREFILL,
    PREFILL_ADAPTER,
    Step,
    Subject,
    take_turns,
)
from benchmarks.speed.overhead.engine import SHAPES

SHAPE = SHAPES["4 layers, 256 wide"]


@pytest.fixture(scope="module")
def model() -> Subject:
    kernels = pytest.importorskip("lora_serve.ops.cpu.backend")
    native = pytest.importorskip("lora_serve.ops._cpu")
    return Subject(SHAPE, kernels.CpuKernels(native.usable_paths()[0], 1), rank=16)


@torch.inference_mode()
def logits_of(model: Subject, step: Step) -> Tensor:
    recording = model.record(step)
    recording.replay()
    return recording.output.float().clone()


def test_each_adapter_changes_its_own_rows(model: Subject) -> None:
    base, one, eight = (logits_of(model, step) for step in (DECODE_8, DECODE_8_OF_1, DECODE_8_OF_8))
    assert base.isfinite().all()
    assert (base != one).any(dim=1).all()
    assert torch.equal(one[0], eight[0])  # both of the first adapter
    assert (one[1:] != eight[1:]).any(dim=1).all()


def test_a_prefill_gives_the_logits_of_its_last_row(model: Subject) -> None:
    base, adapted = logits_of(model, PREFILL), logits_of(model, PREFILL_ADAPTER)
    assert base.shape == adapted.shape == (1, SHAPE.vocab_size)
    assert (base != adapted).any()


def test_a_step_reads_each_of_its_adapters_once(model: Subject) -> None:
    base, one, eight = (
        model.weight_bytes(step) for step in (DECODE_8, DECODE_8_OF_1, DECODE_8_OF_8)
    )
    assert eight - base == 8 * (one - base) > 0


def test_each_run_begins_in_its_turn() -> None:
    order: list[str] = []
    times = take_turns([lambda: order.append("a"), lambda: order.append("b")], 0.0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(own) for own in times] == [3, 3]
