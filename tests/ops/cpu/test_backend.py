from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lora_serve.errors import ConfigError
from lora_serve.ops.contract import LoRAPart, Ops
from tests.ops.cases import normal

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")


@pytest.fixture
def ops() -> Ops:
    return cpu.load()


def test_the_fastest_path_is_the_default_and_in_the_numerics() -> None:
    assert cpu.load().numerics == f"cpu-{cpu.usable_paths()[0]}-{cpu.NUMERICS_VERSION}"


def test_the_environment_forces_a_path() -> None:
    slowest = cpu.usable_paths()[-1]
    code = "from lora_serve.ops.cpu.backend import load; print(load().numerics)"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, cpu.PATH_VARIABLE: slowest},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.strip() == f"cpu-{slowest}-{cpu.NUMERICS_VERSION}"


def test_an_unknown_path_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'avx1024'.*scalar|neon"):
        cpu.load("avx1024")


@pytest.mark.parametrize("block_size", [0, 8, 24])
def test_a_block_size_must_be_a_multiple_of_16(ops: Ops, block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"--block-size {block_size}: .*multiple of 16"):
        ops.attention.new_kv_cache(1, block_size, 1, 64, torch.float32)


@pytest.mark.parametrize("head_size", [0, 40, 272])
def test_a_head_size_must_fit_the_vectors(ops: Ops, head_size: int) -> None:
    with pytest.raises(ConfigError, match=f"head size {head_size}: .*multiple of 16 up to 256"):
        ops.attention.new_kv_cache(1, 16, 1, head_size, torch.float32)


def test_a_dtype_without_kernels_is_refused(ops: Ops) -> None:
    with pytest.raises(ConfigError, match=r"torch\.float64.*torch\.bfloat16"):
        ops.linears.pack_linear(torch.zeros(2, 2, dtype=torch.float64), None)


def test_inputs_may_be_views_of_larger_tensors(ops: Ops, dtype: torch.dtype) -> None:
    wide = normal(6, 4, 64, dtype=dtype)
    x, weight = wide[:, 1], normal(64, 32, dtype=dtype, seed=1).t()
    packed = ops.linears.pack_linear(weight, None)
    assert torch.equal(ops.linears.linear(x, packed), ops.linears.linear(x.clone(), packed))
    ones = torch.ones(64, dtype=dtype)
    assert torch.equal(
        ops.rowwise.rms_norm(x, ones, 1e-6), ops.rowwise.rms_norm(x.clone(), ones, 1e-6)
    )
    assert torch.equal(ops.rowwise.silu_and_mul(x), ops.rowwise.silu_and_mul(x.clone()))


def test_addresses_need_no_alignment(ops: Ops) -> None:
    """Rows of 33 elements start anywhere."""
    x, weight = normal(7, 33, dtype=torch.bfloat16), normal(40, 33, dtype=torch.bfloat16, seed=1)
    packed = ops.linears.pack_linear(weight, None)
    whole = ops.linears.linear(x, packed)
    for row in range(7):
        assert torch.equal(ops.linears.linear(x[row : row + 1], packed)[0], whole[row])


def test_an_empty_batch_gives_an_empty_result(ops: Ops) -> None:
    packed = ops.linears.pack_linear(normal(48, 32, dtype=torch.bfloat16), None)
    assert ops.linears.linear(torch.empty(0, 32, dtype=torch.bfloat16), packed).shape == (0, 48)


def test_adapters_are_packed_beside_running_kernels(ops: Ops) -> None:
    """Another thread packs while the engine computes; neither sees the other."""
    x, weight = normal(64, 512, dtype=torch.bfloat16), normal(512, 512, dtype=torch.bfloat16)
    packed = ops.linears.pack_linear(weight, None)
    expected = ops.linears.linear(x, packed)
    part = LoRAPart(
        normal(64, 512, dtype=torch.bfloat16), normal(512, 64, dtype=torch.bfloat16), 1.0, 0
    )
    adapters: list[object] = []

    def load() -> None:
        adapters.extend(ops.adapters.pack_adapter([[part]] * 8) for _ in range(20))

    loader = threading.Thread(target=load)
    loader.start()
    while loader.is_alive():
        assert torch.equal(ops.linears.linear(x, packed), expected)
    loader.join()
    first, last = (
        ops.adapters.plan_lora([(0, 64, adapter)], 64) for adapter in adapters[:: len(adapters) - 1]
    )
    deltas = [torch.zeros(64, 512, dtype=torch.bfloat16) for _ in range(2)]
    ops.adapters.lora(deltas[0], x, first, 0)
    ops.adapters.lora(deltas[1], x, last, 7)
    assert torch.equal(deltas[0], deltas[1])
    assert deltas[0].any()


def test_a_plan_keeps_its_adapters_alive(ops: Ops) -> None:
    x, part = (
        normal(2, 32, dtype=torch.float32),
        LoRAPart(torch.ones(4, 32), torch.ones(8, 4), 1, 0),
    )
    plan = ops.adapters.plan_lora([(0, 2, ops.adapters.pack_adapter([[part]]))], 2)
    for seed in range(50):  # memory that a freed adapter would have left
        ops.adapters.pack_adapter(
            [[LoRAPart(normal(4, 32, dtype=torch.float32, seed=seed), part.b, 1, 0)]]
        )
    y = torch.zeros(2, 8)
    ops.adapters.lora(y, x, plan, 0)
    assert torch.allclose(y, 4 * x.sum(-1, keepdim=True).expand(2, 8), atol=1e-4)


def test_a_pool_tells_its_threads_apart() -> None:
    ids = cpu.CpuKernels(cpu.usable_paths()[0], 3).native.thread_ids()
    assert len(set(ids)) == 3
    assert ids[0] == threading.get_native_id()


def test_a_pool_as_large_as_the_machine_is_pinned_if_asked() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    ops = cpu.load(num_threads=len(cpus), pin=True)
    new = {task.name for task in Path("/proc/self/task").iterdir()} - before
    assert sorted(os.sched_getaffinity(int(name)) for name in new) == [{c} for c in cpus[1:]]
    assert ops.name == "cpu"
