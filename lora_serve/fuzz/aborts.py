"""What calls that end requests may have done: they end those that they name, and tell how many.

Which of those that were running a call came in time for is known to the server alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from lora_serve.fuzz.answers import Called, Heard
from lora_serve.fuzz.player import Record
from lora_serve.fuzz.trace import Abort, Trace


class Aborts:
    """The calls to /abort_requests in one trace that was played."""

    def __init__(self, trace: Trace, records: Sequence[Record]) -> None:
        self._heard = {
            index: record for index, record in enumerate(records) if isinstance(record, Heard)
        }
        self._calls = [
            (index, trace.aborted_by(index), called)
            for index, (event, called) in enumerate(zip(trace.events, records, strict=True))
            if isinstance(event, Abort) and isinstance(called, Called)
        ]

    def may_have_ended(self, request: int) -> bool:
        """Whether a call can have ended this request, which is an index of the trace."""
        return self._num_that_may_have_ended(request) > 0

    def wrong_numbers(self) -> Iterator[tuple[int, str]]:
        """Calls, as indices of the trace, that told a number which cannot be."""
        for index, named, called in self._calls:
            if not called.is_done:
                continue
            running = [request for request in named if _meets(called, self._heard[request])]
            its_own = [
                request
                for request in running
                if self._heard[request].is_aborted and self._num_that_may_have_ended(request) == 1
            ]
            told = json.loads(called.message)["aborted"]
            if not len(its_own) <= told <= len(running):
                least, most = len(its_own), len(running)
                yield index, f"{told} requests aborted, but it was {least} to {most} of them"

    def _num_that_may_have_ended(self, request: int) -> int:
        heard = self._heard[request]
        return sum(request in named and _meets(called, heard) for _, named, called in self._calls)


def _meets(called: Called, heard: Heard) -> bool:
    """Whether a request may have run when a call came. One that was left may run on a moment."""
    return heard.begin <= called.end and (heard.has_left or heard.end >= called.begin)
