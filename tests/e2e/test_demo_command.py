"""`lora-serve demo` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import SCENARIOS

COMMAND = (sys.executable, "-m", "lora_serve.cli.main", "demo")


@pytest.mark.slow
def test_the_demo_passes_every_row(demo_paths: DemoPaths) -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SCENARIOS)} of {len(SCENARIOS)} rows passed" in done.stdout


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
