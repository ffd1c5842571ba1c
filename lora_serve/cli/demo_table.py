"""Writes the demo's table, row by row as they are played, and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from lora_serve.demo.player import Outcome
from lora_serve.demo.scenarios import Scenario

_ANSWER_WIDTH, _TOLD_CHARS = 30, 24
_GREEN, _RED, _DIM, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"


class DemoTable:
    """Fixed columns; plain text that a log can hold, coloured if asked for."""

    def __init__(self, out: TextIO, *, colours: bool) -> None:
        self._out = out
        self._colours = colours
        self._title_width = 0

    def start(self, titles: Sequence[str]) -> None:
        self._title_width = max(len(title) for title in titles)
        head = f"{'row':>4}  {'scenario':<{self._title_width}}  {'answer':<{_ANSWER_WIDTH}}"
        self._write(f"{head}  {'hit tokens':>22}  {'time':>7}  verdict\n")

    def server(self, flags: Sequence[str]) -> None:
        self._write(self._coloured(f"      serve {' '.join(flags)}\n", _DIM))

    def begin(self, scenario: Scenario) -> None:
        self._write(f"{scenario.row:>4}  {scenario.title:<{self._title_width}}  ")

    def end(self, outcome: Outcome) -> None:
        told = " ".join(outcome.answer.split())[:_TOLD_CHARS]
        answer = f"{told} {outcome.num_right}/{outcome.num_asked}"
        tokens = f"{outcome.num_cached_tokens:,}/{outcome.num_prompt_tokens:,}"
        hits = f"{tokens} {outcome.hit_rate:>4.0%}"
        self._write(f"{answer:<{_ANSWER_WIDTH}}  {hits:>22}  {outcome.seconds:>5.1f} s  ")
        self._write(f"{self._verdict(outcome)}\n")
        for problem in outcome.problems:
            self._write(f"      {self._coloured(problem, _RED)}\n")

    def summary(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if not outcome.passed]
        seconds = sum(outcome.seconds for outcome in outcomes)
        self._write(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} rows passed")
        self._write(f" in {seconds:.0f} s of questions and answers\n")
        for outcome in failed:
            line = f"row {outcome.scenario.row} failed: {outcome.scenario.title}"
            self._write(f"{self._coloured(line, _RED)}\n")

    def _verdict(self, outcome: Outcome) -> str:
        return self._coloured("ok", _GREEN) if outcome.passed else self._coloured("FAILED", _RED)

    def _coloured(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._colours else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
