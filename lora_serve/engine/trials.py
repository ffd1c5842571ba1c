"""Which request kills engines? Those that were there at a death are asked again one at a time.

Answers do not depend on who else is there, so a request that kills does it again, at the same
token. Whoever gets past the token at which it stood is cleared and goes on beside the next one. So
a second death names one request, each further killer costs one more, and nobody else pays more
than time. Most deaths are no request's fault, so the first trials end after PATIENCE_SECONDS for
all at once. Knows no engine: `next_flights` says who may be sent to it.
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
        self._newcomers: deque[Flight] = deque()  # in the order in which they came
        self._patient_until = 0.0

    @property
    def are_over(self) -> bool:
        """Whether nobody waits, and `next_flights` has nobody to name."""
        return self._accused is None and not self._suspects and not self._newcomers

    def add(self, flight: Flight) -> None:
        """A new one; `next_flights` names it when it may take off."""
        self._newcomers.append(flight)

    def next_flights(self) -> list[Flight]:
        """Who may take off now. Ask again whenever anything has happened."""
        flights = []
        if self._accused is None or self._accused.is_over or self._accused.is_past_its_death:
            self._accused = self._next_suspect()
            if self._accused is not None:
                flights.append(self._accused)
        if self._accused is None or self._clock() >= self._patient_until:
            flights += self._release()
        return flights

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

    def _named(self, aboard: Iterable[Flight]) -> Flight | None:
        """The accused, if nobody else can have been the cause, or if it has had its chances."""
        others = [flight for flight in aboard if flight is not self._accused]
        if self._accused is None or all(flight.is_past_its_death for flight in others):
            return self._accused
        return self._accused if self._accused.num_deaths + 1 >= MAX_DEATHS else None

    def _next_suspect(self) -> Flight | None:
        while self._suspects:
            flight = self._suspects.popleft()
            if not flight.is_over:
                return flight
        return None

    def _release(self) -> list[Flight]:
        """Those who need not wait for a trial any longer."""
        free = [flight for flight in self._suspects if flight.num_deaths == 1] + [*self._newcomers]
        self._suspects = deque(flight for flight in self._suspects if flight.num_deaths > 1)
        self._newcomers.clear()
        return [flight for flight in free if not flight.is_over]


def _refusal(flight: Flight) -> RequestFailedError:
    return RequestFailedError(
        f"the engine died {flight.num_deaths} times while it had this request, the last time while "
        "no other was as likely the cause, so it is not tried again; the server's log says how it "
        "died"
    )
