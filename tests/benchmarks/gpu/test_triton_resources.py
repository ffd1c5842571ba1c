"""Kernels are interpreted in the tests' own process; they are compiled in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is installed on Linux x86-64 only")

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def kernels_of(path: Path) -> list[dict[str, Any]]:
    record = json.loads(path.read_text())
    return [dict(zip(record["columns"], row, strict=True)) for row in record["kernels"]]


RECORDS = {
    path.name.removeprefix("triton-").removesuffix("-resources.json"): kernels_of(path)
    for path in sorted(RESULTS.glob("triton-*.json"))
}
HAS_RECORD = pytest.mark.skipif(
    triton.__version__ not in RECORDS,
    reason=f"nothing is recorded of Triton {triton.__version__}",
)
EVERY_RECORD = pytest.mark.parametrize("kernels", RECORDS.values(), ids=RECORDS)


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.triton_resources", "--check", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@EVERY_RECORD
def test_no_kernel_spills_registers(kernels: list[dict[str, Any]]) -> None:
    assert len(kernels) > 100
    assert [entry for entry in kernels if entry["spill_bytes"]] == []


@EVERY_RECORD
def test_what_is_read_before_the_wait_is_what_no_kernel_writes(
    kernels: list[dict[str, Any]],
) -> None:
    """While steps run. So they are bits of the same step, whatever else is still at work."""
    lasting = {"plan_ptr", "weight_ptr", "cos_sin_ptr", "positions_ptr", "slot_mapping_ptr"}
    for entry in kernels:
        if entry["capability"] < 90:
            assert entry["before_wait"] == "never waits", entry
        else:
            assert set(filter(None, entry["before_wait"].split(", "))) <= lasting, entry


@EVERY_RECORD
def test_tiles_of_one_kernel_take_one_instruction(kernels: list[dict[str, Any]]) -> None:
    """Then a row's bits do not tell in which of them it was."""
    instructions = defaultdict(set)
    for entry in kernels:
        key = (entry["model"], entry["kernel"], entry["capability"])
        instructions[key].add(entry["instruction"])
    assert {key: found for key, found in instructions.items() if len(found) > 1} == {}


def test_every_version_recorded_is_of_the_same_launches() -> None:
    """So a version that was not compiled again since kernels changed is found."""
    names = ("model", "work", "kernel", "capability", "num_warps", "num_stages", "tile")
    first, *others = (
        {tuple(entry[name] for name in names) for entry in kernels} for kernels in RECORDS.values()
    )
    assert all(other == first for other in others)


@HAS_RECORD
def test_captured_decode_and_sampling_take_what_was_recorded() -> None:
    works = ("--works", "captured decode of 256", "--capabilities", "90")
    done = check("--models", "0.5B", "any", *works)
    assert done.returncode == 0, done.stderr
    assert "work='captured decode of 256'" in done.stderr
    assert "work='sampling of 32'" in done.stderr


@HAS_RECORD
@pytest.mark.slow
def test_every_kernel_takes_what_was_recorded() -> None:
    done = check()
    assert done.returncode == 0, done.stderr
