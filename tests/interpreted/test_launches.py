"""How a model's kernels are launched, from the flag down, on a card that lets them overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_serve.ops.triton.backend as triton_ops
from lora_serve.config import ModelConfig
from lora_serve.ops.triton import rowwise
from lora_serve.ops.triton.launch import INTERPRETER
from lora_serve.worker.device import CpuDevice
from lora_serve.worker.loaded_model import load_model


class RecordedKernel:
    """launches: what each was given by name."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self.launches.append(given)


@pytest.mark.parametrize("can", [False, True])
@pytest.mark.parametrize("may", [False, True])
def test_a_kernel_waits_if_and_only_if_it_is_launched_early(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, can: bool, may: bool
) -> None:
    kernel, card = RecordedKernel(), replace(INTERPRETER, overlaps_launches=can)
    monkeypatch.setattr(rowwise, "gate_kernel", kernel)
    monkeypatch.setattr(triton_ops, "machine_of", lambda device: card)
    config = ModelConfig(model=str(model_path), override_op=("all=triton",), overlap_launches=may)
    load_model(config, CpuDevice(), 16).ops.rowwise.silu_and_mul(torch.ones(1, 4))
    (given,) = kernel.launches
    assert given["launch_pdl"] == given["OVERLAPS"] == (can and may)
