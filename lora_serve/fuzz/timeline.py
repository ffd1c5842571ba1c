"""Which versions a name can have stood for, and when, as far as an operator's clock can tell.

A call may take effect at any time between its begin and its end, concurrent ones in any order that
gives all their outcomes. One that was refused has no effect, one that failed otherwise may have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from lora_serve.fuzz.answers import Called, CalledAtOnce
from lora_serve.fuzz.player import Record
from lora_serve.fuzz.trace import (
    AdapterCall,
    ConcurrentCalls,
    Event,
    Kill,
    Load,
    Reset,
    Trace,
    Unload,
)
from lora_serve.identity import EVERYTHING, NoAdapter

ABSENT = -1  # instead of a version
REFUSED = (400, 404)
PUBLISHED_LATE_SECONDS = 0.05  # an answer may be written down a little after it was given


@dataclass(frozen=True, slots=True)
class _Stay:
    """A name may have stood for `version` from begin to end. path: of its files; "" if none."""

    version: int
    begin: float
    end: float
    path: str


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls of one name that were sent at once; or a single one. event: the index in the trace."""

    event: int
    calls: tuple[tuple[AdapterCall, Called], ...]

    @property
    def begin(self) -> float:
        return min(called.begin for _, called in self.calls)

    @property
    def end(self) -> float:
        return max(called.end for _, called in self.calls)

    @property
    def is_settled(self) -> bool:
        """Whether each was done or refused, so that it cannot take effect any more."""
        return all(called.is_done or called.status in REFUSED for _, called in self.calls)

    @property
    def stays(self) -> set[_Stay]:
        """What the name may have stood for by one of them."""
        return {
            _stay(call, called)
            for call, called in self.calls
            if isinstance(call, Load | Unload) and called.status not in REFUSED
        }


class Timeline:
    """The changes of names and of the server in one trace that was played.

    impossible: indices of events whose calls no order gives the outcomes that they had.
    """

    def __init__(self, trace: Trace, records: Sequence[Record]) -> None:
        calls = [(event, called) for _, event, called in calls_of(trace, records)]
        self.impossible: list[int] = []
        self._stays = {
            name: self._stays_of(sorted(listed, key=lambda one: one.begin))
            for name, listed in _changes(trace, records).items()
        }
        self._writes = [
            (_path(event), called.begin)
            for event, called in calls
            if isinstance(event, Load) and event.place
        ]
        self._kills = [called for event, called in calls if isinstance(event, Kill)]
        self._resets = [
            (event.scope, called) for event, called in calls if isinstance(event, Reset)
        ]

    def _stays_of(self, changes: Iterable[_Calls]) -> list[_Stay]:
        """What a name may have stood for: each change lasts until the next certain one."""
        ended: list[_Stay] = []
        lasting = {_Stay(ABSENT, -math.inf, math.inf, "")}
        for change in changes:
            after = _after_all(lasting, change)
            if not after:
                self.impossible.append(change.event)
            lasting |= change.stays
            if after and change.is_settled:
                end = change.end + PUBLISHED_LATE_SECONDS
                ended += [replace(stay, end=end) for stay in lasting - after]
                lasting = after
        return [*ended, *lasting]

    def versions(self, lora_name: str, begin: float, end: float) -> set[int]:
        """The versions that `lora_name` may have stood for from begin to end; ABSENT for none."""
        stays = self._stays.get(lora_name, [_Stay(ABSENT, -math.inf, math.inf, "")])
        return {stay.version for stay in stays if stay.begin <= end and stay.end >= begin}

    def may_have_changed(self, lora_name: str, begin: float, end: float) -> bool:
        """Whether files that the name may have stood for were written to before `end`."""
        return any(
            stay.path == path and stay.begin < written <= end
            for stay in self._stays.get(lora_name, ())
            if stay.begin <= end and stay.end >= begin
            for path, written in self._writes
        )

    def num_kills(self, begin: float, end: float) -> int:
        """How many engines were killed, or not yet replaced, at some time from begin to end."""
        return sum(kill.begin <= end and kill.end >= begin for kill in self._kills)

    def was_reset_between(self, adapter: str | NoAdapter, end: float, begin: float) -> bool:
        """Whether KV of requests that had ended by `end` must not be found from `begin` on."""
        return any(
            scope in (EVERYTHING, adapter) and called.is_done and end < called.begin
            and called.end < begin
            for scope, called in self._resets
        )  # fmt: skip


def calls_of(trace: Trace, records: Sequence[Record]) -> Iterator[tuple[int, Event, Called]]:
    """Each call of an operator with its outcome; index: of the event that it is, or is part of."""
    for index, (event, record) in enumerate(zip(trace.events, records, strict=True)):
        if isinstance(record, Called):
            yield index, event, record
        elif isinstance(event, ConcurrentCalls) and isinstance(record, CalledAtOnce):
            for call, called in zip(event.calls, record.outcomes, strict=True):
                yield index, call, called


def _changes(trace: Trace, records: Sequence[Record]) -> dict[str, list[_Calls]]:
    """List by name what the player sent one after another: single calls, and those sent at once."""
    together: defaultdict[tuple[str, int], list[tuple[AdapterCall, Called]]] = defaultdict(list)
    for index, call, called in calls_of(trace, records):
        if isinstance(call, AdapterCall) and call.lora_name is not None:
            together[call.lora_name, index].append((call, called))
    changes: defaultdict[str, list[_Calls]] = defaultdict(list)
    for (name, index), calls in together.items():
        changes[name].append(_Calls(index, tuple(calls)))
    return changes


def _after_all(before: set[_Stay], change: _Calls) -> set[_Stay]:
    """What the name may stand for after all these calls; none if no order gives their outcomes."""
    after: set[_Stay] = set()
    for order in permutations(change.calls):
        stays = before
        for call, called in order:
            stays = {later for stay in stays for later in _after(stay, call, called)}
        after |= stays
    return after


def _after(stay: _Stay, call: AdapterCall, called: Called) -> set[_Stay]:
    """What the name may stand for after one call; none if it cannot have had this outcome."""
    is_there = stay.version != ABSENT
    changed = stay if isinstance(call, Reset) else _stay(call, called)
    if isinstance(call, Load):
        may_be_done = call.in_place or not is_there
        may_be_refused = call.in_place or is_there  # in place: for its files
    else:
        may_be_done, may_be_refused = is_there, not is_there
    if called.is_done:
        return {changed} if may_be_done else set()
    if called.status in REFUSED:
        return {stay} if may_be_refused else set()
    return {stay, changed}


def _stay(call: Load | Unload, called: Called) -> _Stay:
    version = call.version if isinstance(call, Load) else ABSENT
    return _Stay(version, called.begin, math.inf, _path(call))


def _path(event: Event) -> str:
    if isinstance(event, Load) and event.place:
        return f"{event.lora_name}/{event.place}"
    return ""
