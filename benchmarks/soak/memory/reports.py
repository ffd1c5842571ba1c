"""Asks the server's processes what they hold, and says by what it grew."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

HOOK = Path(__file__).parent / "hook"
PATIENCE_SECONDS = 60.0
NUM_SHOWN = 12
MIB = 2**20


class Report(msgspec.Struct, frozen=True):
    """What a process holds.

    used_bytes, free_bytes: of malloc, in use and not given back to the system. types: how many
    objects there are by type; lines: bytes of Python by line of code, where that is traced.
    """

    resident_bytes: int
    used_bytes: int
    free_bytes: int
    num_arenas: int
    num_python_blocks: int
    num_objects: int
    types: dict[str, int]
    lines: dict[str, int]

    @property
    def figures(self) -> tuple[float, ...]:
        """What COLUMNS names."""
        sizes = (self.resident_bytes, self.used_bytes, self.free_bytes)
        mib = (round(each / MIB, 1) for each in sizes)
        return (*mib, self.num_arenas, self.num_python_blocks, self.num_objects)

    @property
    def row(self) -> tuple[str, ...]:
        return tuple(f"{each:,}" for each in self.figures)


COLUMNS = ("resident MiB", "used", "free", "arenas", "Python blocks", "objects")


def environment(directory: Path, *, traces: bool) -> dict[str, str]:
    """What processes need in their environment to write reports to `directory`."""
    return {
        "PYTHONPATH": str(HOOK),
        "MEMORY_REPORTS": str(directory),
        **({"TRACE_MEMORY": "1"} if traces else {}),
    }


class Reporter:
    """Asks one process."""

    def __init__(self, pid: int, directory: Path) -> None:
        self._pid = pid
        self._directory = directory
        self._next = 0

    def ask(self) -> Report:
        os.kill(self._pid, signal.SIGUSR1)
        return self._await()

    def ask_after_cleaning(self) -> tuple[Report, Report]:
        """What it holds when its garbage is collected, and when malloc gave back what it could."""
        os.kill(self._pid, signal.SIGUSR2)
        _, collected, trimmed = (self._await() for _ in range(3))
        return collected, trimmed

    def _await(self) -> Report:
        path = self._directory / f"{self._pid}.{self._next}.json"
        self._next += 1
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not path.exists():
            assert time.monotonic() < deadline, f"process {self._pid} wrote no {path.name}"
            time.sleep(0.05)
        return msgspec.json.decode(path.read_bytes(), type=Report)


def growth(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, str]]:
    """What there is most more of, and how much."""
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    most = sorted(grown, key=lambda name: -grown[name])[:NUM_SHOWN]
    return [(name, f"{grown[name]:+,}") for name in most if grown[name] > 0]
