from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_serve.ops.block_rows import (
    BlockRows,
    HostBlockRows,
    TorchBlockRows,
    can_copy_natively,
    open_block_rows,
)

SOURCE = Path(__file__).parents[2] / "csrc" / "cuda" / "block_copy.cu"
NVCC = shutil.which("nvcc")


def random_layers(*sizes: int, device: str = "cpu") -> list[Tensor]:
    return [torch.randint(256, (9, size), dtype=torch.uint8, device=device) for size in sizes]


ON_CPUS = pytest.mark.parametrize("opened", [TorchBlockRows, HostBlockRows])


@ON_CPUS
def test_a_row_is_a_blocks_share_of_each_layer_in_turn(
    opened: Callable[[list[Tensor]], BlockRows],
) -> None:
    layers = random_layers(32, 48)
    rows = opened(layers).read([7, 0, 7]).rows()
    assert rows[1] == b"".join(layer[0].numpy().tobytes() for layer in layers)
    assert rows[0] == rows[2]


@ON_CPUS
def test_rows_that_were_read_stay_as_they_were(
    opened: Callable[[list[Tensor]], BlockRows],
) -> None:
    layers = random_layers(32, 48)
    read = opened(layers).read([3])
    before = b"".join(layer[3].numpy().tobytes() for layer in layers)
    for layer in layers:
        layer.bitwise_not_()
    assert read.rows() == (before,)


@ON_CPUS
def test_rows_written_to_other_blocks_leave_all_the_rest_alone(
    opened: Callable[[list[Tensor]], BlockRows],
) -> None:
    layers = random_layers(32, 48)
    before = [layer.clone() for layer in layers]
    copier = opened(layers)
    first, second = copier.read([1, 8]).rows()
    copier.write([5, 2], [memoryview(first), second])
    for layer, old in zip(layers, before, strict=True):
        expected = old.clone()
        expected[5], expected[2] = old[1], old[8]
        assert torch.equal(layer, expected)


def test_cpus_copy_bytes_without_torch() -> None:
    assert isinstance(open_block_rows(random_layers(32, 32)), HostBlockRows)


def test_the_native_copy_takes_whole_words_of_equal_layers() -> None:
    assert can_copy_natively(random_layers(32, 32))
    assert not can_copy_natively(random_layers(32, 48))
    assert not can_copy_natively(random_layers(24, 24))


@pytest.mark.skipif(NVCC is None, reason="nvcc is not here: csrc/cuda was NOT compiled")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_cuda_source_compiles_and_spills_nothing(architecture: str, tmp_path: Path) -> None:
    assert NVCC is not None
    command = (NVCC, "-O3", "-std=c++17", "-cubin", f"-arch={architecture}", "-Xptxas", "-v")
    run = subprocess.run(
        [*command, "-Werror", "all-warnings", "-o", str(tmp_path / "out"), str(SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    usage = [line for line in run.stderr.splitlines() if "spill" in line]
    assert len(usage) == 2, run.stderr
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in usage), usage


def test_the_native_copy_tells_what_the_card_said() -> None:
    native = pytest.importorskip("lora_serve.ops._cuda", reason="csrc/cuda was NOT built")
    native.gather_blocks(0, 0, 0, 0, 0, 0, 0)  # of nothing: no card is needed
    if torch.cuda.is_available():
        pytest.skip("a card would try to read address 0")
    with pytest.raises(RuntimeError, match=r"copying KV blocks: .*CUDA"):
        native.scatter_blocks(0, 1, 0, 1, 0, 16, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("block_bytes", [16, 16 * 255, 16 * 4096])
def test_the_native_copy_is_torchs(block_bytes: int) -> None:
    pytest.importorskip("lora_serve.ops._cuda", reason="built where nvcc is")
    layers = random_layers(block_bytes, block_bytes, block_bytes, device="cuda")
    native, plain = open_block_rows(layers), TorchBlockRows(layers)
    assert type(native) is not type(plain), "the CUDA extension was not built"
    rows = plain.read([8, 0, 3]).rows()
    assert native.read([8, 0, 3]).rows() == rows
    expected = [layer.clone() for layer in layers]
    TorchBlockRows(expected).write([1, 5, 2], rows)
    native.write([1, 5, 2], rows)
    assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))
