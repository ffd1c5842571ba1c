from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_serve.errors import ConfigError
from lora_serve.models.source import load_spec
from lora_serve.worker.memory import (
    CPU_DEFAULT_BYTES,
    GpuMemory,
    cpu_room,
    largest_adapter_bytes,
)
from tests.fakes.peft_adapters import make_peft, read_saved

GIB = 2**30
CARD = GpuMemory(
    free=80 * GIB,
    utilization=0.5,
    weights=15 * GIB,
    step=2 * GIB,
    graphs=1 * GIB,
    adapters=3 * GIB,
)


def test_a_gpus_kv_gets_what_the_other_parts_of_the_budget_leave() -> None:
    assert CARD.room().num_bytes == 19 * GIB


def test_a_budget_that_leaves_nothing_is_refused_with_its_parts() -> None:
    told = r"no memory is left for KV.*0\.5 of 80\.00 GiB free.*15\.00 GiB for weights.*lower"
    with pytest.raises(ConfigError, match=told):
        replace(CARD, adapters=22 * GIB).room()


def test_a_cpus_share_is_bounded_three_ways() -> None:
    assert cpu_room(100 * GIB, 0.5, 100 * GIB).num_bytes == CPU_DEFAULT_BYTES
    assert cpu_room(2 * GIB, 0.5, 100 * GIB).num_bytes == GIB
    assert cpu_room(100 * GIB, 0.5, 100).num_bytes == 100


def test_the_largest_adapter_is_as_large_as_its_tensors(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """make_peft's adapters change every projection."""
    spec = load_spec(directories["qwen2"])
    checkpoint = read_saved(make_peft("qwen2", 1, r=16), tmp_path, spec)
    values = sum(
        module.rank * (module.a.shape[1] + module.b.shape[0]) for module in checkpoint.modules
    )
    assert largest_adapter_bytes(spec.linears(), 16, torch.float16.itemsize) == 2 * values
    assert largest_adapter_bytes(spec.linears(), 3, torch.float16.itemsize) == 2 * values
