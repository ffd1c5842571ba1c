"""Which request kills engines? Those that were there at a death are asked again one at a time.

Answers do not depend on who else is there, so a request that kills does it again, at the same
token. Whoever gets past the token at which it stood is cleared and goes on beside the next one. So
a second death names one request, each further killer costs one more, and nobody else pays more
than time. Most deaths are no request's fault, so the first quarantine ends after
PATIENCE_SECONDS for all at once. Knows no engine: `next_to_send` says who may be sent to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from lora_serve.engine.frontend.request_states import RequestState
from lora_serve.errors import EngineDeadError, RequestFailedError

# How long requests that come after a death, and those that were there at one death alone, wait for
# the quarantine. A request that was there at two is tried to the end.
PATIENCE_SECONDS = 10.0
MAX_DEATHS = 3  # that the accused may see in group which could be the cause, too


class Quarantine:
    """Who is suspected, who is tried, and who waits until that is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: deque[RequestState] = deque()  # the shortest trial first
        self._accused: RequestState | None = None  # is being tried
        self._free: deque[RequestState] = (
            deque()
        )  # suspected of too little to be tried, and newcomers
        self._patient_until = 0.0

    @property
    def are_over(self) -> bool:
        """Whether nobody waits, and `next_to_send` has nobody to name."""
        return self._accused is None and not self._suspects and not self._free

    def add(self, state: RequestState) -> None:
        """A new one; `next_to_send` names it when it may take off."""
        self._free.append(state)

    def next_to_send(self) -> RequestState | None:
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

    def engine_died(self, error: EngineDeadError, states: Iterable[RequestState]) -> None:
        """End those that cannot be flown again, and suspect the others that were sent.

        states: all there are, whether sent or not.
        """
        states = [state for state in states if not state.is_over]
        sent = [state for state in states if state.is_sent]
        named = self._named(sent)
        for state in sent:
            state.note_death()
            if state is named:
                state.fail(_refusal(state))
            elif state.has_begun:
                state.fail(error)
            else:
                state.rewind()
        self._accused = None
        suspects = [f for f in states if f.num_deaths and not f.is_over]
        suspects.sort(key=lambda state: state.num_tokens_at_death)
        self._suspects = deque(suspects)
        self._free = deque(f for f in self._free if not f.num_deaths)  # the others are suspects

    def _named(self, sent: Iterable[RequestState]) -> RequestState | None:
        """The accused, if nobody else can have been the cause, or if it has had its chances."""
        others = [state for state in sent if state is not self._accused]
        if self._accused is None or all(state.is_past_its_death for state in others):
            return self._accused
        return self._accused if self._accused.num_deaths + 1 >= MAX_DEATHS else None

    def _release(self) -> None:
        """Who was there at one death alone need not wait for a trial any longer."""
        self._free.extendleft(f for f in reversed(self._suspects) if f.num_deaths == 1)
        self._suspects = deque(f for f in self._suspects if f.num_deaths > 1)


def _take(states: deque[RequestState]) -> RequestState | None:
    """The first that is not over, and leave those before it out."""
    while states:
        state = states.popleft()
        if not state.is_over:
            return state
    return None


def _refusal(state: RequestState) -> RequestFailedError:
    return RequestFailedError(
        f"the engine died {state.num_deaths} times while it had this request, the last time while "
        "no other was as likely the cause, so it is not tried again; the server's log says how it "
        "died"
    )
