"""Time by part of the step, and objects that note it down on the way to the real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any


class Stopwatch:
    """Seconds by part since the last `take`. Parts may lie inside each other."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return taken

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose time is noted."""

        def run(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments)
            self.add(part, time.perf_counter() - begin)
            return result

        return run


class Timed:
    """Stands for `target`: the methods named are timed, all else is the target's own."""

    def __init__(self, target: Any, watch: Stopwatch, parts: Mapping[str, str]) -> None:
        self._target = target
        for method, part in parts.items():
            setattr(self, method, watch.timed(part, getattr(target, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each part's median over the steps; a part that a step did not have took no time in it."""
    parts = {part for step in steps for part in step}
    return {part: median(step.get(part, 0.0) for step in steps) for part in parts}
