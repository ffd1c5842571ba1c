"""When something was killed or stopped, and not yet there again: what excuses a refusal."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STORE = "the store"


@dataclass(slots=True)
class _Span:
    whom: str
    begin: float
    end: float = math.inf


@dataclass(slots=True)
class Troubles:
    """counts: of what was done, by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    _spans: list[_Span] = field(default_factory=list)

    @contextmanager
    def of(self, whom: str, what: str) -> Iterator[None]:
        """whom: STORE, or a server's address. Until the end of this it is not as it should be."""
        self.counts[what] += 1
        span = _Span(whom, time.monotonic())
        self._spans.append(span)
        yield
        span.end = time.monotonic()

    def met(self, whom: str, begin: float, end: float) -> bool:
        """Whether anything was wrong with it at some time between these."""
        return any(s.whom == whom and s.begin <= end and s.end >= begin for s in self._spans)

    def met_any(self, begin: float, end: float) -> bool:
        return any(s.begin <= end and s.end >= begin for s in self._spans)
