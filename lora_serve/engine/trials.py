"""Which request kills engines? Those that were there at a death are asked again one at a time.

Answers do not depend on who else is there, so a request that kills does it again, at the same
token. Whoever gets past the token at which it stood is cleared and goes on beside the next one. So
a second death names one request, each further killer costs one more, and nobody else pays more
than time. Most deaths are no request's fault, so the first trials end after PATIENCE_SECONDS for
all at once. Knows no engine: `next_flight` says who may be sent to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from lora_serve.engine.flights import Flight
from lora_serve.errors import EngineDeadError, RequestFailedError

# How long those who come after a death wait for the trials, and with them those who were there at
# one death alone. Whoever was there at two is tried to the end.
PATIENCE_SECONDS = 10.0
MAX_DEATHS = 3  # that the accused may see in company which could be the cause, too


class Trials:
    """Who is suspected, who is tried, and who waits until that is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: deque[Flight] = deque()  # the shortest trial first
        self._accused: Flight | None = None  # is being tried
        self._free: deque[Flight] = deque()  # suspected of too little to be tried, and newcomers
        self._patient_until = 0.0

    @property
    def are_over(self) -> bool:
        """Whether nobody waits, and `next_flight` has nobody to name."""
        return self._accused is None and not self._suspects and not self._free

    def add(self, flight: Flight) -> None:
        """A new one; `next_flight` names it when it may take off."""
        self._free.append(flight)

    def next_flight(self) -> Flight | None:
        """Who may take off now. One at a time: each may change who is next, or all may die.

        Ask until it is nobody, and again whenever anything has happened.
        """
        if self._accused is None or self._accused.is_over or self._accused.is_past_its_death:
            self._accused = _take(self._suspects)
            if self._accused is not None:
                return self._accused
        if self._accused is not None:
            if self._clock() < self._patient_until:
                return None
            self._release()
        return _take(self._free)

    def engine_is_back(self) -> None:
        self._patient_until = self._clock() + PATIENCE_SECONDS

    def engine_died(self, error: EngineDeadError, flights: Iterable[Flight]) -> None:
        """End those that cannot be flown again, and suspect the others that were aboard.

        flights: all there are, whether aboard or not.
        """
        flights = [flight for flight in flights if not flight.is_over]
        aboard = [flight for flight in flights if flight.is_aboard]
        named = self._named(aboard)
        for flight in aboard:
            flight.note_death()
            if flight is named:
                flight.fail(_refusal(flight))
            elif flight.has_begun:
                flight.fail(error)
            else:
                flight.rewind()
        self._accused = None
        suspects = [f for f in flights if f.num_deaths and not f.is_over]
        suspects.sort(key=lambda flight: flight.num_tokens_at_death)
        self._suspects = deque(suspects)
        self._free = deque(f for f in self._free if not f.num_deaths)  # the others are suspects

    def _named(self, aboard: Iterable[Flight]) -> Flight | None:
        """The accused, if nobody else can have been the cause, or if it has had its chances."""
        others = [flight for flight in aboard if flight is not self._accused]
        if self._accused is None or all(flight.is_past_its_death for flight in others):
            return self._accused
        return self._accused if self._accused.num_deaths + 1 >= MAX_DEATHS else None

    def _release(self) -> None:
        """Who was there at one death alone need not wait for a trial any longer."""
        self._free.extendleft(f for f in reversed(self._suspects) if f.num_deaths == 1)
        self._suspects = deque(f for f in self._suspects if f.num_deaths > 1)


def _take(flights: deque[Flight]) -> Flight | None:
    """The first that is not over, and leave those before it out."""
    while flights:
        flight = flights.popleft()
        if not flight.is_over:
            return flight
    return None


def _refusal(flight: Flight) -> RequestFailedError:
    return RequestFailedError(
        f"the engine died {flight.num_deaths} times while it had this request, the last time while "
        "no other was as likely the cause, so it is not tried again; the server's log says how it "
        "died"
    )
