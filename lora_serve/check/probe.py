"""What a probe is, and what comes of one. Knows neither HTTP nor any single probe."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

from lora_serve.check.findings import Exchange, Need, Violation
from lora_serve.check.lab import Lab


class Verdict(Enum):
    PASS = "pass"
    FAIL = "FAIL"
    UNSUPPORTED = "not supported"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """note: a reason, or a reservation about a pass. exchanges: all of it, in order."""

    probe: Probe
    verdict: Verdict
    seconds: float = 0.0
    note: str = ""
    violation: Violation | None = None
    exchanges: tuple[Exchange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One thing that must never happen. run: returns a note, or raises an error of findings.py."""

    name: str
    proves: str
    needs: tuple[Need, ...] = ()
    run: Callable[[Lab], Awaitable[str]] = field(repr=False)
