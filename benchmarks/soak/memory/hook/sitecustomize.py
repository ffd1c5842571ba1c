"""Has a Python process tell what it holds: on SIGUSR1 as it is, on SIGUSR2 after a clean-up, too.

Imported by each Python process that starts with this directory on PYTHONPATH. MEMORY_REPORTS names
the directory of the reports, JSON files PID.NUMBER.json; TRACE_MEMORY=1 has Python note which line
each of its blocks is from.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import tracemalloc
from collections import Counter
from itertools import count

MOST_TOLD = 300  # types, and lines of code


class MallInfo(ctypes.Structure):
    """What glibc says of all arenas together, in bytes: mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def report(libc: ctypes.CDLL) -> dict[str, object]:
    libc.mallinfo2.restype = MallInfo
    heap = libc.mallinfo2()
    objects = gc.get_objects()
    types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)
    lines: dict[str, int] = {}
    if tracemalloc.is_tracing():
        told = tracemalloc.take_snapshot().statistics("lineno")[:MOST_TOLD]
        lines = {str(each.traceback[0]): each.size for each in told}
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "used_bytes": heap.uordblks + heap.hblkhd,  # Python's own arenas are among the mapped
        "free_bytes": heap.fordblks,
        "num_arenas": _num_arenas(libc),
        "num_python_blocks": sys.getallocatedblocks(),
        "num_objects": len(objects),
        "types": dict(types.most_common(MOST_TOLD)),
        "lines": lines,
    }


def _num_arenas(libc: ctypes.CDLL) -> int:
    """How many there are by malloc_info(3), which writes to a FILE."""
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    file = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, file)
    libc.fclose(file)
    found = (text.value or b"").count(b"<heap nr=")
    libc.free(text)
    return found


def install(directory: str) -> None:
    libc = ctypes.CDLL(None)
    numbers = count()

    def write() -> None:
        path = os.path.join(directory, f"{os.getpid()}.{next(numbers)}.json")
        with open(f"{path}.new", "w") as file:
            json.dump(report(libc), file)
        os.rename(f"{path}.new", path)

    def clean_up() -> None:
        write()
        gc.unfreeze()
        gc.collect()
        write()
        libc.malloc_trim(0)
        write()

    signal.signal(signal.SIGUSR1, lambda *_: write())
    signal.signal(signal.SIGUSR2, lambda *_: clean_up())


if directory := os.environ.get("MEMORY_REPORTS"):
    if os.environ.get("TRACE_MEMORY"):
        tracemalloc.start()
    install(directory)
