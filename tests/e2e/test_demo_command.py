"""`lora-serve demo` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.demo.client import Client
from lora_serve.demo.given_model import distinct_adapters, first_answer, given_model
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.player import Player
from lora_serve.demo.scenarios import SCENARIOS, Ask, Scenario
from lora_serve.demo.smollm2 import ensure_smollm2
from lora_serve.errors import ConfigError

COMMAND = (sys.executable, "-m", "lora_serve.cli.main", "demo")


@pytest.mark.slow
def test_the_demo_passes_every_row(demo_paths: DemoPaths) -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SCENARIOS)} of {len(SCENARIOS)} rows passed" in done.stdout


@pytest.mark.slow
def test_the_demo_passes_every_row_on_a_model_that_speaks_english() -> None:
    try:
        ensure_smollm2(print)
    except ConfigError as error:
        warnings.warn(f"SmolLM2 is not to be had: {error}", stacklevel=1)
        pytest.skip(str(error))
    command = (*COMMAND, "--model", "smollm2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What is the capital of France? The capital of France is Paris.\n" in done.stdout
    assert f"{len(SCENARIOS)} of {len(SCENARIOS)} rows passed" in done.stdout


def test_any_model_can_be_played_on(
    cold_client: Client, client: Client, demo_paths: DemoPaths, tmp_path: Path
) -> None:
    given = given_model(str(demo_paths.model), print)
    assert first_answer(cold_client) == "What is the capital of France? Paris."
    one, other, questions, _ = distinct_adapters(cold_client, given, tmp_path)
    player = Player(client, DemoPaths(demo_paths.model, one, other), tmp_path, questions)
    swapped = Player(client, DemoPaths(demo_paths.model, other, one), tmp_path, questions)
    for row in (5, 8):  # the second with another first line
        assert player.play(played_as(row, 100 + row)).problems == []
        assert "instead of" in swapped.play(played_as(row, 200 + row)).problems[0]


def played_as(row: int, number: int) -> Scenario:
    """A row, of few questions, with adapters under other names than its own."""
    scenario = SCENARIOS[row - 1]
    steps = [replace(s, count=min(s.count, 3)) if isinstance(s, Ask) else s for s in scenario.steps]
    return replace(scenario, row=number, steps=tuple(steps))


@pytest.fixture
def hearing_interrupts() -> Iterator[None]:
    """What a shell starts in the background ignores interrupts, as do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hearing_interrupts")
def test_an_interrupted_demo_leaves_neither_servers_nor_files(
    demo_paths: DemoPaths, short_path: Path
) -> None:
    environment = {**os.environ, "TMPDIR": str(short_path)}
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, env=environment) as demo:
        assert demo.stdout is not None
        assert b"scenario" in demo.stdout.readline()  # its first server is about to start
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        assert demo.stdout.read() == b""
    assert list(short_path.iterdir()) == []
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(short_path) not in running.stdout
