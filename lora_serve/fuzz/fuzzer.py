"""Plays a trace, judges it, and makes a failing one small."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_serve.fuzz.judge import Finding, Judge
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.runners import TraceRun, TraceRunner
from lora_serve.fuzz.shrink import shrink
from lora_serve.fuzz.trace import Trace

TRIES = 2  # a trace that passes when shrunk may have been lucky


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of playing a trace, and what was wrong with it."""

    run: TraceRun
    findings: list[Finding]

    @property
    def is_clean(self) -> bool:
        return not (self.findings or self.run.troubles)

    def lines(self) -> list[str]:
        """The findings, a line each."""
        wrong = [
            f"event {finding.event}: {finding.what}" if finding.event is not None else finding.what
            for finding in self.findings
        ]
        return wrong + [f"server: {trouble}" for trouble in self.run.troubles]


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """Holds what traces are played on, and what their answers are compared with.

    flags: the user's, which stand after a trace's.
    """

    runner: TraceRunner
    cold: ColdEngine
    block_size: int
    flags: Sequence[str] = ()

    def check(self, trace: Trace) -> Verdict:
        run = self.runner.play(trace)
        if len(run.records) < len(trace.events):  # the server did not start
            return Verdict(run, [])
        cold = self.cold.under((*trace.flags, *self.flags))
        return Verdict(run, Judge(trace, run.records, cold, self.block_size).findings())

    def shrink(self, trace: Trace, seconds: float, on_smaller: Callable[[Trace], None]) -> Trace:
        """A small trace that fails like `trace`, found within so many seconds."""
        deadline = time.monotonic() + seconds

        def fails(candidate: Trace) -> bool:
            for _ in range(TRIES):
                if not self.check(candidate).is_clean:
                    on_smaller(candidate)
                    return True
            return False

        return shrink(trace, fails, lambda: time.monotonic() < deadline)
