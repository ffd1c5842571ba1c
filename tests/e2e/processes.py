"""The processes below one that a test started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from descendants(child)


def _children(pid: int) -> set[int]:
    """A process that a thread started is the child of that thread."""
    found: set[int] = set()
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # the process has ended meanwhile
        return found
    for thread in threads:
        try:
            found.update(map(int, (thread / "children").read_text().split()))
        except OSError:  # this thread has, others go on
            continue
    return found


def pids_below(pid: int, kind: bytes) -> list[int]:
    """The processes whose command line has `kind` in it."""
    found = []
    for each in descendants(pid):
        try:
            if kind in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
        except OSError:
            continue
    return sorted(found)
