"""Reads gauges and counters off /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx


def metric(base_url: str, name: str) -> float:
    """The sum over its labels; a name that is not there is an error."""
    # verify: else every call reads all certificates of the machine, for no use here
    lines = httpx.get(f"{base_url}/metrics", timeout=30, verify=False).text.splitlines()
    values = [
        float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))
    ]
    assert values, f"no metric {name}"
    return sum(values)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.05)
