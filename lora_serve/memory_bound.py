"""How much memory this process has, and a bound on what it takes while it reads a hostile file.

For libraries that take memory as a file asks, before they compare that with what the file holds.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def memory_in_use() -> tuple[int, int]:
    """Bytes of address space, and of memory."""
    with open("/proc/self/statm") as file:
        size, resident, *_ = file.read().split()
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Let this process have so many more bytes of address space; what asks for more gets an error.

    Its other threads have no more either, so there should be none that matters.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    most = min([memory_in_use()[0] + num_bytes, *limits])
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
