"""How much of the machine others use. A figure measured beside them says less."""

from __future__ import annotations

import os
import time
from pathlib import Path

IDLE_FIELDS = slice(3, 5)  # of the cpu line of /proc/stat: idle and waiting for disks


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that were at work on average, over a time in which the caller does nothing."""
    busy, start = _busy_seconds(), time.monotonic()
    time.sleep(seconds)
    return (_busy_seconds() - busy) / (time.monotonic() - start)


def _busy_seconds() -> float:
    first = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(field) for field in first.split()[1:9]]  # what follows is counted in user already
    return (sum(ticks) - sum(ticks[IDLE_FIELDS])) / os.sysconf("SC_CLK_TCK")
