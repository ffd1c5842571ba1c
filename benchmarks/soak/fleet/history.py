"""Which versions a name can have stood for, by what its operators were told, and when.

A change takes effect between its begin and its end, in the order of serials. One whose outcome was
not told may have taken effect, before every change of its name that was begun after its end: a
store writes only what was planned on the record that it has. Once a change was told to be
everywhere, no request that is sent later may be answered by an earlier version. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ABSENT = ""  # in place of a version
UNTOLD = 0  # in place of a serial


@dataclass(frozen=True, slots=True)
class Change:
    """version: what the name stands for by it. serial: UNTOLD if its outcome is not known."""

    name: str
    version: str
    begin: float
    end: float
    serial: int = UNTOLD
    is_everywhere: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """version: ABSENT where there was no such name. process: that gave it; "" if not known."""

    name: str
    version: str
    begin: float
    end: float
    process: str = ""


class History:
    """What all changes allow. Changes that were refused are none of them."""

    def __init__(self, changes: Iterable[Change]) -> None:
        by_name: defaultdict[str, list[Change]] = defaultdict(list)
        for change in changes:
            by_name[change.name].append(change)
        self._names = {name: _Name(listed) for name, listed in by_name.items()}
        self._none = _Name([])

    def disorders(self) -> Iterator[str]:
        """Changes that ended before another one of their name began, and have a later serial."""
        for name in self._names.values():
            yield from name.disorders()

    def fault_of(self, answer: Answer) -> str | None:
        """Why no such answer may have been given; None if it may."""
        return self._names.get(answer.name, self._none).fault_of(answer)

    def returns(self, answers: Iterable[Answer]) -> Iterator[str]:
        """Answers of a process by an earlier version than it answered with before."""
        by_place: defaultdict[tuple[str, str], list[Answer]] = defaultdict(list)
        for answer in answers:
            if answer.process:
                by_place[answer.process, answer.name].append(answer)
        for (_, name), given in by_place.items():
            yield from self._names.get(name, self._none).returns(given)

    @property
    def num_races(self) -> int:
        """How many changes were begun while another one of their name was on its way."""
        return sum(name.num_races for name in self._names.values())


class _Name:
    """The changes of one name."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._told = sorted((c for c in changes if c.serial), key=lambda change: change.serial)
        self._by_begin = sorted(changes, key=lambda change: change.begin)
        begun = [change for change in self._by_begin if change.serial]
        self._begins = [change.begin for change in begun]
        # of the told changes that began at or after each of these
        self._least_after = [*accumulate((c.serial for c in reversed(begun)), min)][::-1]
        ended = sorted(self._told, key=lambda change: change.end)
        self._ends = [change.end for change in ended]
        self._most_before = [*accumulate((change.serial for change in ended), max)]
        claims = [change for change in ended if change.is_everywhere]
        self._claim_ends = [change.end for change in claims]
        self._claims = [*accumulate((change.serial for change in claims), max)]
        self._by_version: defaultdict[str, list[Change]] = defaultdict(list)
        for change in changes:
            self._by_version[change.version].append(change)

    def disorders(self) -> Iterator[str]:
        for change in self._told:
            before = _before(self._ends, self._most_before, change.begin)
            if before >= change.serial:
                yield f"{change} began when {before} had ended"

    def fault_of(self, answer: Answer) -> str | None:
        claim = self._claim_before(answer.begin)
        latest = max((self._places(change)[1] for change in self._of(answer)), default=-1)
        if latest < 0:
            return f"{answer}: the name never stood for it"
        return f"{answer}: {claim} was everywhere before" if latest < claim else None

    def returns(self, answers: Sequence[Answer]) -> Iterator[str]:
        """answers: of one process."""
        ended = sorted(answers, key=lambda answer: answer.end)
        least = [*accumulate((self._least(answer) for answer in ended), max)]
        ends = [answer.end for answer in ended]
        for answer in answers:
            before = _before(ends, least, answer.begin)
            latest = max((self._places(change)[1] for change in self._of(answer)), default=math.inf)
            if latest < before:
                yield f"{answer}: the same process had answered with {before:.0f} before"

    @property
    def num_races(self) -> int:
        latest, num_races = -math.inf, 0
        for change in self._by_begin:
            num_races += change.begin < latest
            latest = max(latest, change.end)
        return num_races

    def _of(self, answer: Answer) -> list[Change]:
        """The changes that may have led to it; a name stands for nothing before all of them."""
        found = [c for c in self._by_version.get(answer.version, ()) if c.begin <= answer.end]
        if answer.version == ABSENT:
            found.append(Change(answer.name, ABSENT, -math.inf, -math.inf))
        return found

    def _least(self, answer: Answer) -> float:
        """The place in the order that it has at least shown, if all is right."""
        claim = self._claim_before(answer.begin)
        places = [self._places(change) for change in self._of(answer)]
        return min((max(least, claim) for least, most in places if most >= claim), default=0)

    def _places(self, change: Change) -> tuple[float, float]:
        """The first and the last place in the order of serials that it may have."""
        if change.serial:
            return change.serial, change.serial
        first = _before(self._ends, self._most_before, change.begin)
        after = bisect_left(self._begins, change.end)
        last = self._least_after[after] - 0.5 if after < len(self._begins) else math.inf
        return first, last

    def _claim_before(self, moment: float) -> int:
        return _before(self._claim_ends, self._claims, moment)


def _before(ends: Sequence[float], most: Sequence[float], moment: float) -> int:
    """The most that had been reached when the moment came; 0 if nothing had."""
    count = bisect_left(ends, moment)
    return int(most[count - 1]) if count else 0
