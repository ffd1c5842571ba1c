"""Writes outcomes for a reader: a line each as they come, then each failure explained.

All that a server said passes through `shown` on its way to the terminal.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from lora_serve.check.facts import Facts
from lora_serve.check.findings import Exchange
from lora_serve.check.probe import Outcome, Probe, Verdict
from lora_serve.check.server import Target, without_keys
from lora_serve.check.shown import shown

NOTE_CHARS = 200
MOST_REPEATED = 12  # requests shown of a failure; all of them are in the JSON file
REQUEST_CHARS = 240
COLOURS = {
    Verdict.PASS: "\x1b[32m",
    Verdict.FAIL: "\x1b[31m",
    Verdict.ERROR: "\x1b[33m",
    Verdict.UNSUPPORTED: "\x1b[2m",
}
PLAIN = "\x1b[0m"


class Report:
    """A table that grows while probes run. `out` gets plain text, coloured if asked for."""

    def __init__(self, out: TextIO, probes: Sequence[Probe], *, colours: bool) -> None:
        self._out = out
        self._colours = colours
        self._width = max(len(probe.name) for probe in probes)
        self._verdict_width = max(len(verdict.value) for verdict in Verdict)

    def start(self, target: Target, facts: Facts, tolerance: float) -> None:
        said = "equal to the bit" if not tolerance else f"logprobs within {tolerance:g}"
        cached = "counts them" if facts.tells_cached else "does not count them"
        rows = {
            "server": shown(without_keys(target).url),
            "model": shown(facts.model),
            "prompts": f"{facts.lines} lines, about {facts.lines * facts.tokens_per_line:,.0f} "
            "tokens",
            "answers": said + ("" if facts.has_logprobs else "; it gives no logprobs, so texts"),
            "cached tokens": f"the server {cached}",
            "cold answers": facts.cold_way.value,
        }
        for name, value in rows.items():
            self._write(f"{name:<14}{value}\n")
        self._write("\n")

    def add(self, outcome: Outcome) -> None:
        verdict = f"{outcome.verdict.value:<{self._verdict_width}}"
        coloured = self._coloured(verdict, COLOURS[outcome.verdict])
        line = f"{outcome.probe.name:<{self._width}}  {coloured}  {outcome.seconds:>6.1f} s"
        self._write(f"{line}  {shown(outcome.note, NOTE_CHARS)}\n")

    def finish(self, outcomes: Sequence[Outcome], tolerance: float) -> None:
        """Explain what failed, and count."""
        failed = [outcome for outcome in outcomes if outcome.verdict is Verdict.FAIL]
        for outcome in failed:
            self._explain(outcome)
        counts = Counter(outcome.verdict for outcome in outcomes)
        parts = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]]
        self._write(f"\n{len(outcomes)} probes: {', '.join(parts)}\n")
        rounding = sum(bool(one.violation and one.violation.is_rounding) for one in failed)
        if rounding:
            self._write(
                f"{rounding} of the failures may be rounding: the answers are close. To look past "
                "what a server without batch invariance does: --tolerance 0.25\n"
            )
        if tolerance:
            self._write(f"Logprobs up to {tolerance:g} apart counted as equal (--tolerance).\n")

    def _explain(self, outcome: Outcome) -> None:
        violation = outcome.violation
        assert violation is not None, "a failure has a violation"
        self._write(f"\n{self._coloured(outcome.probe.name, COLOURS[Verdict.FAIL])}\n")
        self._write(f"  must hold     {outcome.probe.proves}\n")
        self._write(f"  happened      {shown(violation.what)}\n")
        for name, text in (
            ("first differ", violation.where),
            ("right", violation.right),
            ("answered", violation.wrong),
            ("hint", violation.hint),
        ):
            for index, line in enumerate(text.splitlines()):
                self._write(f"  {name if index == 0 else '':<14}{shown(line, 1600)}\n")
        self._repeat(outcome.exchanges)

    def _repeat(self, exchanges: Sequence[Exchange]) -> None:
        """The requests that led there, the last ones if there were many."""
        last = exchanges[-MOST_REPEATED:]
        left = len(exchanges) - len(last)
        more = f", the last {len(last)} of {len(exchanges)}" if left else ""
        self._write(
            f"  to repeat     these requests, in order{more} (--json FILE has all, whole):\n"
        )
        for exchange in last:
            self._write(f"    {shown(as_command(exchange), REQUEST_CHARS)} -> {exchange.status}\n")

    def _coloured(self, text: str, colour: str) -> str:
        return f"{colour}{text}{PLAIN}" if self._colours else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def as_command(exchange: Exchange) -> str:
    """The request as arguments of a shell's curl, with $URL for the server."""
    data = shlex.quote(json.dumps(exchange.body)) if exchange.body else ""
    words = f"curl -s -X {exchange.method} $URL{exchange.path}"
    return f"{words} -H 'Content-Type: application/json' -d {data}" if data else words


def listing(probes: Sequence[Probe]) -> str:
    """Every probe, what it proves and what it needs."""
    lines = []
    for probe in probes:
        lines.append(f"{probe.name}\n    {probe.proves}")
        if probe.needs:
            lines.append(f"    needs {', '.join(need.value for need in probe.needs)}")
    return "\n".join(lines)
