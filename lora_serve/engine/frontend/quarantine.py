"""Finds the request that kills engines, and lets the others go on.

Answers do not depend on what else is in the batch, so a poison request kills again, at the same
token. Requests that an engine had when it died are quarantined: they are sent to the next engine
one at a time, shortest first, each when the one before has got past the token at which it stood.
So a second death names one request, each further poison request costs one more death, and the
others lose nothing but time. Most deaths are no request's fault, so a first quarantine ends for
all after PATIENCE_SECONDS. Knows no engine: `next_to_send` says which request may be sent to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from lora_serve.engine.frontend.request_states import RequestState
from lora_serve.errors import EngineDeadError, RequestFailedError

# How long new requests, and those that saw a single death, wait for the quarantine to end. A
# request that saw two is probed to the end.
PATIENCE_SECONDS = 10.0
MAX_DEATHS = 3  # of a probed request, beside others that may have been the cause


class Quarantine:
    """Requests that are not with the engine yet, in the order in which they may be sent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quarantined: deque[RequestState] = deque()  # the shortest probe first
        self._probed: RequestState | None = None  # sent alone, and not yet past its death
        self._waiting: deque[RequestState] = deque()  # new, or released from the quarantine
        self._patient_until = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether `next_to_send` has nothing to give, now and until the next `add`."""
        return self._probed is None and not self._quarantined and not self._waiting

    def add(self, state: RequestState) -> None:
        """Take in a new request; `next_to_send` gives it when it may be sent."""
        self._waiting.append(state)

    def next_to_send(self) -> RequestState | None:
        """A request that may be sent now. One at a time: sending it may change which is next.

        Ask until it is None, and again whenever a request has got an output or has ended.
        """
        if self._probed is None or self._probed.is_over or self._probed.is_past_its_death:
            self._probed = _take(self._quarantined)
            if self._probed is not None:
                return self._probed
        if self._probed is not None:
            if self._clock() < self._patient_until:
                return None
            self._release()
        return _take(self._waiting)

    def engine_is_back(self) -> None:
        self._patient_until = self._clock() + PATIENCE_SECONDS

    def engine_died(self, error: EngineDeadError, states: Iterable[RequestState]) -> None:
        """End the requests that cannot be sent again, and quarantine the others that were sent.

        states: all there are, whether sent or not.
        """
        states = [state for state in states if not state.is_over]
        sent = [state for state in states if state.is_sent]
        poison = self._poison(sent)
        for state in sent:
            state.note_death()
            if state is poison:
                state.fail(_refusal(state))
            elif state.has_begun:
                state.fail(error)
            else:
                state.rewind()
        self._probed = None
        quarantined = [state for state in states if state.num_deaths and not state.is_over]
        quarantined.sort(key=lambda state: state.num_tokens_at_death)
        self._quarantined = deque(quarantined)
        self._waiting = deque(state for state in self._waiting if not state.num_deaths)

    def _poison(self, sent: Iterable[RequestState]) -> RequestState | None:
        """The probed request, if no other can be the cause, or if it has seen MAX_DEATHS."""
        others = [state for state in sent if state is not self._probed]
        if self._probed is None or all(state.is_past_its_death for state in others):
            return self._probed
        return self._probed if self._probed.num_deaths + 1 >= MAX_DEATHS else None

    def _release(self) -> None:
        """Let requests that saw a single death go on without a probe."""
        released = [state for state in self._quarantined if state.num_deaths == 1]
        self._waiting.extendleft(reversed(released))
        self._quarantined = deque(state for state in self._quarantined if state.num_deaths > 1)


def _take(states: deque[RequestState]) -> RequestState | None:
    """Remove the first state that is not over, and those before it."""
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
