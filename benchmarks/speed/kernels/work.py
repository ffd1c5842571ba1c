"""A kernel call to be timed, on whatever device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """flops and num_bytes: what the task asks for at least, whatever kernel does it."""

    name: str
    run: Callable[[], object]
    flops: float
    num_bytes: float
