from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lora_serve.ops.recorded_steps import NotRecordableError, RecordedWork
from tests.ops.cases import normal

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

DTYPE = torch.bfloat16


def ops_that_record() -> tuple[cpu.Ops, Callable[[Callable[[], Tensor]], RecordedWork]]:
    ops = cpu.load(num_threads=2)
    assert ops.record is not None
    return ops, ops.record


class Layers:
    """Enough kernels after each other that a chunk of memory serves several of them."""

    def __init__(self, ops: cpu.Ops, rows: int) -> None:
        self.ops = ops
        self.weight = normal(20, 48, dtype=DTYPE)
        self.packed = [
            ops.linears.pack_linear(normal(2 * 48, 48, dtype=DTYPE, seed=seed), None)
            for seed in range(4)
        ]
        self.ones = torch.ones(48, dtype=DTYPE)
        self.input_ids = torch.arange(rows)

    def __call__(self) -> Tensor:
        residual = self.ops.rowwise.embed(self.weight, self.input_ids, None)
        normed = self.ops.rowwise.rms_norm(residual, self.ones, 1e-6)
        for packed in self.packed:
            x = self.ops.rowwise.silu_and_mul(self.ops.linears.linear(normed, packed))
            normed = self.ops.rowwise.add_rms_norm(x, residual, self.ones, 1e-6)
        return normed


class CappedLayers(Layers):
    """What Gemma computes: scaled rows, weights of norms in float32, capped logits."""

    def __init__(self, ops: cpu.Ops, rows: int) -> None:
        super().__init__(ops, rows)
        self.wide = self.ones.float()

    def __call__(self) -> Tensor:
        residual = self.ops.rowwise.embed(self.weight, self.input_ids, 1.5)
        normed = self.ops.rowwise.rms_norm(residual, self.wide, 1e-6)
        for packed in self.packed:
            x = self.ops.rowwise.gelu_tanh_and_mul(self.ops.linears.linear(normed, packed))
            normed = self.ops.rowwise.add_rms_norm(x, residual, self.wide, 1e-6)
        return self.ops.rowwise.soft_cap(normed, 0.7)


@pytest.mark.parametrize("kind", [Layers, CappedLayers])
@torch.inference_mode()
def test_a_replay_gives_the_bits_of_the_calls_on_what_memory_holds_by_then(
    kind: type[Layers],
) -> None:
    ops, record = ops_that_record()
    layers = kind(ops, 5)
    work = record(layers)
    gc.collect()
    others = [torch.full((64, 48), torch.nan, dtype=DTYPE) for _ in range(50)]
    for first in (0, 7, 15):
        layers.input_ids.copy_(torch.arange(first, first + 5))
        work.replay()
        assert torch.equal(work.output, layers())
    assert all(other.isnan().all() for other in others)


@torch.inference_mode()
def test_recordings_share_memory_and_keep_their_own_outputs() -> None:
    ops, record = ops_that_record()
    first, second = Layers(ops, 6), Layers(ops, 3)
    works = [record(first), record(second)]
    works[0].replay()
    kept = works[0].output.clone()
    works[1].replay()
    assert torch.equal(works[0].output, kept)
    assert torch.equal(works[1].output, second())


@torch.inference_mode()
def test_nothing_runs_while_it_is_recorded() -> None:
    ops, record = ops_that_record()
    y = torch.zeros(1, 48, dtype=DTYPE)
    ones = torch.ones(48, dtype=DTYPE)
    work = record(lambda: ops.rowwise.add_rms_norm(ones[None], y, ones, 1e-6))
    assert not y.any()
    work.replay()
    assert torch.equal(y[0], ones)


@pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: x.t().contiguous(), lambda x: x[torch.tensor([0])]],
    ids=["a sum", "a copy", "a lookup"],
)
@torch.inference_mode()
def test_what_torch_computes_between_kernels_cannot_be_recorded(
    compute: Callable[[Tensor], Tensor],
) -> None:
    """A replay would leave it out. Afterwards kernels run again."""
    ops, record = ops_that_record()
    layers = Layers(ops, 2)
    with pytest.raises(NotRecordableError, match="torch computes aten"):
        record(lambda: compute(layers()))
    assert layers().isfinite().all()


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    ops, _ = ops_that_record()
    with pytest.raises(IndexError, match="token id 20 in a vocabulary of 20"):
        ops.rowwise.embed(normal(20, 48, dtype=DTYPE), torch.tensor([3, 20]), None)
