"""A Ctrl-C that something swallows ends the start all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lora_serve.cli.interrupt import interrupted_once


def swallow_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_that_was_lost_is_raised_again_and_a_second_one_is_not() -> None:
    before, context = signal.getsignal(signal.SIGINT), interrupted_once()
    interrupt = context.__enter__()
    try:
        interrupt.raise_if_lost()  # nothing yet
        swallow_an_interrupt()
        os.kill(os.getpid(), signal.SIGINT)  # nothing
        with pytest.raises(KeyboardInterrupt):
            interrupt.raise_if_lost()
        with pytest.raises(KeyboardInterrupt):  # where the block ends, too
            context.__exit__(None, None, None)
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_an_interrupt_the_handler_before_is_there_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupted_once():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


SCRIPT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "transformers":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                print("swallowed")

if __name__ == "__main__":  # the engine's process imports this file, too
    sys.meta_path.insert(0, Interrupts())
    from lora_serve.cli.main import main
    sys.exit(main(["serve", "/no/model/here", "--host", "127.0.0.1", "--port", "0"]))
"""


def test_a_start_does_not_go_on_behind_an_import_that_swallows_an_interrupt(
    tmp_path: Path, short_path: Path
) -> None:
    """It would end with 2, for there is no such model."""
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TMPDIR": str(short_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (130, "swallowed\n"), done.stderr
    assert list(short_path.iterdir()) == []
