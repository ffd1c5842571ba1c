"""Why a test of others does not pass here, where that is no fault: on purpose, or not applicable.

A verdict belongs to a file, or to a test by the beginning of its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compat.vllm_suite import SuiteResult


@dataclass(frozen=True, slots=True)
class Verdict:
    """kind: "differs" (on purpose) or "not applicable"."""

    file: str
    name: str
    kind: str
    reason: str

    def is_about(self, result: SuiteResult) -> bool:
        return result.file.endswith(self.file) and result.name.startswith(self.name)


VERDICTS: tuple[Verdict, ...] = ()


def verdict_of(result: SuiteResult, verdicts: Sequence[Verdict] = VERDICTS) -> Verdict | None:
    """The first verdict about a test that did not pass."""
    return next((verdict for verdict in verdicts if verdict.is_about(result)), None)
