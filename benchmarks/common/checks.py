"""What a long run must have kept to: checks with their figures, and how levels are compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NoReturn

from lora_serve.observability.table import text_table

MOST_GROWTH = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    title: str
    passed: bool
    figures: str


def level(title: str, before: Sequence[float], after: Sequence[float], slack: float = 0) -> Check:
    """Whether the later median is at most MOST_GROWTH and `slack` above the earlier one."""
    if not (before and after):
        return Check(title, False, "nothing to compare")
    then, now = median(before), median(after)
    passed = now <= then * (1 + MOST_GROWTH) + slack
    return Check(title, passed, f"{then:,.0f}, then {now:,.0f}")


def report(checks: Sequence[Check], stories: Sequence[str]) -> NoReturn:
    """Print them, and what went wrong; exit code 1 if a check fails."""
    rows = [(check.title, "yes" if check.passed else "NO", check.figures) for check in checks]
    print(text_table(("check", "holds", "figures"), rows))
    for story in stories:
        print(story)
    sys.exit(not all(check.passed for check in checks))
