"""The processes below one that a test started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def descendants(pid: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += (thread / "children").read_text().split()
    except OSError:  # it has ended meanwhile
        return
    for child in {*map(int, children)}:
        yield child
        yield from descendants(child)


def pids_below(pid: int, kind: bytes) -> list[int]:
    """Those whose command line has `kind` in it."""
    found = []
    for each in descendants(pid):
        try:
            if kind in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
        except OSError:
            continue
    return sorted(found)
