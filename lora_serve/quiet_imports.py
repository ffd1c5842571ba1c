"""Keeps the garbage collector away from imports.

What they make stays, some hundred thousand objects of an engine, and collections would walk over
all of it time and again. `benchmarks/speed/start.py` measures what that takes of a start.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing meanwhile, and what was made only after `gc.unfreeze`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
