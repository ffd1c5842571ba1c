"""What the death of each thread of an engine's process does: it is the death of the process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lora_serve
from lora_serve.observability.lost_threads import EXIT_CODE_OF_LOST_THREAD
from tests.fakes.lost_threads import LOSSES, SURVIVAL_SECONDS

PACKAGE = Path(lora_serve.__file__).parent


def lose(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fakes.lost_threads", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", LOSSES)
def test_a_thread_that_dies_takes_the_process_with_it(name: str) -> None:
    ended = lose(name)
    assert ended.returncode == EXIT_CODE_OF_LOST_THREAD, ended.stderr
    assert f"the engine ends: its thread {name} has died" in ended.stderr
    assert re.search(r"^ *(\S*Bug: a bug|msgspec\.ValidationError: )", ended.stderr, re.MULTILINE)


def test_the_engine_thread_takes_the_process_with_it_and_waits_for_no_other() -> None:
    begin = time.monotonic()
    ended = lose("the engine's")
    assert ended.returncode == 1, ended.stderr
    assert time.monotonic() - begin < SURVIVAL_SECONDS
    entry = r"\S+ \S+ CRITICAL .*: the engine ends by an error .*\n(  .*\n)+  \S*Bug: a bug\n"
    assert re.match(entry, ended.stderr), ended.stderr
    assert "\nTraceback" not in ended.stderr, "beside the log"


def test_every_thread_that_an_engine_starts_is_in_the_list() -> None:
    """Named as in the code, so a new thread fails here until it has a fault of its own."""
    control_plane = [PACKAGE / part for part in ("engine/core", "adapters", "kv", "kv_tiers")]
    sources = "".join(
        path.read_text() for root in control_plane for path in sorted(root.rglob("*.py"))
    )
    threads = re.findall(r"threading\.Thread\((.*?)daemon=True", sources, re.DOTALL)
    names = {
        match[1] for text in threads for match in [re.search(r'name=f?"([^"]+)"', text)] if match
    }
    assert len(threads) == sources.count("threading.Thread(")
    assert names == {
        name.replace("-ram-load", "-{self.name}-{work}").replace("-ram-save", "-{self.name}-{work}")
        for name in LOSSES
    }
