"""What a process holds of the machine, read off /proc: memory, descriptors, threads."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Footprint:
    """rss_bytes: resident memory, that of mapped files included."""

    rss_bytes: int
    num_descriptors: int
    num_threads: int


def footprint(pid: int) -> Footprint | None:
    """What the process holds now; None if there is no such process any more."""
    process = Path(f"/proc/{pid}")
    try:
        resident = int((process / "statm").read_text().split()[1])
        return Footprint(
            rss_bytes=resident * PAGE_BYTES,
            num_descriptors=len(os.listdir(process / "fd")),
            num_threads=len(os.listdir(process / "task")),
        )
    except (OSError, IndexError):  # it ended, or is about to: then there is nothing left to read
        return None


def server_footprints(server_pid: int) -> tuple[Footprint, Footprint]:
    """The API process's and its engine's, both of which live."""
    pid = engine_pid(server_pid)
    api, engine = footprint(server_pid), footprint(pid) if pid else None
    assert api is not None, "the server is gone"
    assert engine is not None, "the engine is gone"
    return api, engine


def engine_pid(server_pid: int) -> int | None:
    """The server's child that runs an engine; None between two of them."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    return next((int(pid) for pid in children if b"spawn_main" in _command(pid)), None)


def grammars_pid(engine: int) -> int | None:
    """The engine's child that follows grammars; None while there is none."""
    name = b"lora_serve.structured_output.process"
    return next((pid for pid in _children(engine) if name in _command(str(pid))), None)


def num_processes(pid: int) -> int:
    """The process and all below it."""
    return 1 + sum(map(num_processes, _children(pid)))


def _children(pid: int) -> list[int]:
    """The children that any of its threads has started and that live; none if it has ended."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def server_cpu_seconds(server_pid: int) -> float:
    """Processor time of the API process and of the engine that it has now."""
    pid = engine_pid(server_pid)
    return cpu_seconds(server_pid) + (cpu_seconds(pid) if pid else 0.0)


def _command(pid: str) -> bytes:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def cpu_seconds(pid: int) -> float:
    """Processor time that the process has used, its ended children left out; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
