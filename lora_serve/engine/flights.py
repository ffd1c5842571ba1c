"""Prompts that are being answered: whom to tell what, and what to ask of a new engine again.

A flight that has not begun to tell its caller anything can be flown again by another engine, with
the same outcome to the bit; one that has begun cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lora_serve.errors import LoraServeError, RequestFailedError, SlowReaderError
from lora_serve.messages import EngineRequest
from lora_serve.outputs import OutputDelta

MAX_CRASHES = 2


@dataclass(slots=True, eq=False)
class Flight:
    """One prompt's choices.

    is_streamed: the caller takes deltas as they come; else all at once, when there are no more.
    max_backlog: deltas that may wait for a caller who takes them as they come.
    """

    requests: Sequence[EngineRequest]
    is_streamed: bool
    max_backlog: int
    num_growing: int = field(init=False)
    has_begun: bool = False
    num_crashes: int = 0
    _deltas: asyncio.Queue[OutputDelta | LoraServeError] = field(default_factory=asyncio.Queue)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.num_growing = len(self.requests)

    @property
    def is_over(self) -> bool:
        """Its last delta, or its error, waits for the caller or has reached him."""
        return self._over.is_set()

    def put(self, delta: OutputDelta) -> bool:
        """Keep a delta for the caller; False when too many wait already, which ends the flight."""
        if self.is_streamed and self._deltas.qsize() >= self.max_backlog:
            self.fail(
                SlowReaderError(
                    f"{self.max_backlog} pieces of the answer wait to be read; it was given up. "
                    "Read faster, or raise --max-stream-backlog"
                )
            )
            return False
        self._deltas.put_nowait(delta)
        self.num_growing -= delta.finish_reason is not None
        if not self.num_growing:
            self._over.set()
        return True

    def fail(self, error: LoraServeError) -> None:
        """The caller gets this after what waits for it; a caller who gets all at once, only it.

        A flight that is over does not fail any more.
        """
        if self.is_over:
            return
        if not self.is_streamed:
            self._discard_deltas()
        self._deltas.put_nowait(error)
        self._over.set()

    async def get(self) -> OutputDelta:
        """The next delta, or raises the error that ended the flight."""
        if not self.is_streamed:
            await self._over.wait()
        delta = await self._deltas.get()
        if isinstance(delta, LoraServeError):
            raise delta
        self.has_begun = True
        return delta

    def crash(self) -> LoraServeError | None:
        """The engine died. Why the flight cannot be flown again; None if it now can be."""
        self.num_crashes += 1
        if self.num_crashes >= MAX_CRASHES:
            return RequestFailedError(
                f"the engine died {self.num_crashes} times while it had this request, which is "
                "therefore not tried again; the server's log says how it died"
            )
        self._discard_deltas()
        self.num_growing = len(self.requests)
        return None

    def _discard_deltas(self) -> None:
        while not self._deltas.empty():
            self._deltas.get_nowait()


class Flights:
    """All flights, by the engine's request ids."""

    def __init__(self) -> None:
        self._by_request_id: dict[str, Flight] = {}

    def __iter__(self) -> Iterator[Flight]:
        """Each once, oldest first."""
        return iter(dict.fromkeys(self._by_request_id.values()))

    def __contains__(self, flight: Flight) -> bool:
        return self._by_request_id.get(flight.requests[0].request_id) is flight

    def get(self, request_id: str) -> Flight | None:
        return self._by_request_id.get(request_id)

    def add(self, flight: Flight) -> None:
        self._by_request_id.update((request.request_id, flight) for request in flight.requests)

    def remove(self, flight: Flight) -> None:
        for request in flight.requests:
            del self._by_request_id[request.request_id]

    def fail_all(self, error: LoraServeError) -> None:
        for flight in self:
            flight.fail(error)
