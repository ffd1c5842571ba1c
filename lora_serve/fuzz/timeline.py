"""Which versions a name can have stood for, and when, as far as an operator's clock can tell.

A call may take effect at any time between its begin and its end. One that failed may have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lora_serve.fuzz.answers import Called
from lora_serve.fuzz.player import Record
from lora_serve.fuzz.trace import Event, Kill, Load, Reset, Trace, Unload
from lora_serve.identity import EVERYTHING, NoAdapter

ABSENT = -1  # instead of a version
PUBLISHED_LATE_SECONDS = 0.05  # an answer may be written down a little after it was given


@dataclass(frozen=True, slots=True)
class _Stay:
    """A name may have stood for `version` from begin to end. path: of its files; "" if none."""

    version: int
    begin: float
    end: float
    path: str


class Timeline:
    """The changes of names and of the server in one trace that was played."""

    def __init__(self, trace: Trace, records: Sequence[Record]) -> None:
        calls = [
            (event, record)
            for event, record in zip(trace.events, records, strict=True)
            if isinstance(record, Called)
        ]
        changes: defaultdict[str, list[tuple[Load | Unload, Called]]] = defaultdict(list)
        for event, called in calls:
            if isinstance(event, Load | Unload):
                changes[event.lora_name].append((event, called))
        for listed in changes.values():
            listed.sort(key=lambda change: change[1].begin)
        self._stays = {name: _stays(listed) for name, listed in changes.items()}
        self._writes = [
            (_path(event), called.begin)
            for listed in changes.values()
            for event, called in listed
            if isinstance(event, Load) and event.place
        ]
        self._kills = [called for event, called in calls if isinstance(event, Kill)]
        self._resets = [
            (event.scope, called) for event, called in calls if isinstance(event, Reset)
        ]

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


def _stays(changes: Iterable[tuple[Load | Unload, Called]]) -> list[_Stay]:
    """The versions a name may have stood for: each change lasts until the next certain one."""
    stays: list[_Stay] = []
    open_stays = [_Stay(ABSENT, -math.inf, math.inf, "")]
    for event, called in changes:
        if called.is_done:
            end = called.end + PUBLISHED_LATE_SECONDS
            stays += [_Stay(one.version, one.begin, end, one.path) for one in open_stays]
            open_stays = []
        version = event.version if isinstance(event, Load) else ABSENT
        open_stays.append(_Stay(version, called.begin, math.inf, _path(event)))
    return stays + open_stays


def _path(event: Event) -> str:
    if isinstance(event, Load) and event.place:
        return f"{event.lora_name}/{event.place}"
    return ""
