"""What was heard of all calls, and what of it must not have been."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.soak.fleet.history import Answer, Change

MAX_STORIES = 50
ANSWERED, NO_SUCH_NAME, SERVER_DOWN = "answered", "no such name", "its server was down"
MACHINE_STILL = "the machine stood still"
UNEXPECTED, OTHER_BITS = "unexpected", "other bits"
EVERYWHERE, INCOMPLETE, REFUSED, NOT_TOLD = "everywhere", "incomplete", "refused", "not told"


@dataclass(slots=True)
class Journal:
    """answers, changes: what was told. heard, done: how requests and changes ended, by kind."""

    answers: list[Answer] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    heard: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)
    _bits: dict[tuple[str, int], str] = field(default_factory=dict)

    def note_answer(self, answer: Answer, question: int, bits: str) -> None:
        """bits: all that must be equal wherever this version answers this question."""
        self.answers.append(answer)
        self.heard[ANSWERED] += 1
        known = self._bits.setdefault((answer.version, question), bits)
        if bits != known:
            self.blame(OTHER_BITS, f"{answer}: {bits}, not {known}")

    def note_change(self, kind: str, change: Change) -> None:
        self.changes.append(change)
        self.done[kind] += 1

    def blame(self, what: str, story: str) -> None:
        self.heard[what] += 1
        if len(self.stories) < MAX_STORIES:
            self.stories.append(f"{what}: {story}")
