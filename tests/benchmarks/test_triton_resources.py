"""Kernels are interpreted in the tests' own process; they are compiled in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux x86-64 only")

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "triton-resources.json").read_text())


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.triton_resources", "--check", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_no_kernel_spills_registers() -> None:
    assert len(RECORD["kernels"]) > 100
    assert [entry for entry in RECORD["kernels"] if entry["spill_bytes"]] == []


def test_tiles_of_one_kernel_take_one_instruction() -> None:
    """Then a row's bits do not tell in which of them it was."""
    instructions = defaultdict(set)
    for entry in RECORD["kernels"]:
        key = (entry["model"], entry["kernel"], entry["capability"])
        instructions[key].add(entry["instruction"])
    assert {key: found for key, found in instructions.items() if len(found) > 1} == {}


def test_captured_decode_takes_what_was_recorded() -> None:
    done = check("--models", "0.5B", "--works", "captured decode of 256", "--capabilities", "90")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_kernel_takes_what_was_recorded() -> None:
    done = check()
    assert done.returncode == 0, done.stderr
