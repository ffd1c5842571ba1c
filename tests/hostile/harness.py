"""Runs a check on what hypothesis makes up: a few examples in the suite, minutes of them by hand.

A check fails by an exception. The long run also fails when memory grows from one batch to the next.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

logger = logging.getLogger(__name__)  # pytest --log-cli-level=INFO shows the counts

LONG_SECONDS = 150.0
BATCH = 2000
MAX_GROWTH_BYTES = 64 * 2**20  # batches of one kind of hostility differ by a few MiB

Check = Callable[[object], None]


def run_quick(cases: SearchStrategy[object], check: Check, num_examples: int) -> None:
    """The same examples each time."""
    _run(cases, check, settings(max_examples=num_examples, derandomize=True))


def run_long(cases: SearchStrategy[object], check: Check) -> int:
    """New examples for LONG_SECONDS; how many there were."""
    num_examples = 0

    def counted(case: object) -> None:
        nonlocal num_examples
        num_examples += 1
        check(case)

    phases = (Phase.generate, Phase.target, Phase.shrink)
    options = settings(max_examples=BATCH, database=None, phases=phases)
    until = time.monotonic() + LONG_SECONDS
    seed = int.from_bytes(os.urandom(4))
    _run(cases, counted, options, seed)  # warms everything up
    resident = resident_bytes()
    while time.monotonic() < until:
        seed += 1
        _run(cases, counted, options, seed)
    growth = resident_bytes() - resident
    logger.info("%d examples, %.1f MiB more memory", num_examples, growth / 2**20)
    assert growth < MAX_GROWTH_BYTES, f"{num_examples} examples left {growth} bytes behind"
    return num_examples


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _run(
    cases: SearchStrategy[object], check: Check, options: settings, seed: int | None = None
) -> None:
    def test(case: object) -> None:
        check(case)

    # Large examples are the point; that a machine is slow is no failure.
    lenient = settings(options, deadline=None, suppress_health_check=list(HealthCheck))
    runner = lenient(given(cases)(test))
    (runner if seed is None else hypothesis.seed(seed)(runner))()
