"""What is told of a request that generates, once it has been answered: its access line, its span.

The middleware makes one for each, and those who work on the request note here what they learn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.requests import Request

from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.outputs import AnswerTimes, OutputDelta

STATE_KEY = "record"
CLIENT_LEFT = "client_left"


class RecordedSpan(Protocol):
    """The span of a request, as a tracing system has it."""

    @property
    def trace_id(self) -> str: ...

    @property
    def traceresponse(self) -> str:
        """What an answer's header of that name holds."""

    def end(self, record: RequestRecord, route: str, status: int) -> None: ...


class RequestRecord:
    """One HTTP request, with all of its prompts and their choices.

    model: as the client named it; "" before its body was read. requests: those that the engine was
    asked. adapter: the version that answers. max_text_chars: how much of an answer is kept.
    error: the type of what the client was told went wrong.
    span: its own, if there is one.
    """

    def __init__(self, max_text_chars: int = 0) -> None:
        self.arrival = time.monotonic()
        self.model = ""
        self.requests: Sequence[GenerateRequest] = ()
        self.adapter: AdapterRef | NoAdapter = BASE_MODEL
        self.num_output_tokens = 0
        self.text = ""
        self.error = ""
        self.span: RecordedSpan | None = None
        self._max_text_chars = max_text_chars
        self._num_cached: dict[int, int] = {}  # by prompt, once it has begun to be answered
        self._first_token: float | None = None
        self._times: list[AnswerTimes] = []  # of the choices that have ended
        self._finish_reasons: dict[str, None] = {}
        self._num_finished = 0
        self._is_in_background = False
        self._tell: Callable[[], None] | None = None

    def note_asked(self, model: str, requests: Sequence[GenerateRequest]) -> None:
        self.model, self.requests = model, requests

    def note(self, prompt_index: int, delta: OutputDelta) -> None:
        """Take in a delta. This runs for each token, so it does little but at begins and ends."""
        self.num_output_tokens += len(delta.token_ids)
        if prompt_index not in self._num_cached:
            self._note_first(prompt_index, delta)
        if delta.finish_reason is not None:
            self._note_last(delta.finish_reason, delta.times)
        if self._max_text_chars:
            self.text += delta.text[: self._max_text_chars - len(self.text)]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.prompt.num_tokens for request in self.requests)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._num_cached.values())

    @property
    def last_times(self) -> AnswerTimes | None:
        """The times of the choice that ended last; None if none has ended."""
        return self._times[-1] if self._times else None

    @property
    def queue_seconds(self) -> float | None:
        """How long the prompt waited that waited longest; None if no choice has ended."""
        return max((times.scheduled - times.arrival for times in self._times), default=None)

    @property
    def first_token_seconds(self) -> float | None:
        """Until the first token of all; None without one.

        It counts from when the engine was asked; from the request's head if no choice has ended.
        """
        if self._times:
            return min(times.first_token - times.arrival for times in self._times)
        return None if self._first_token is None else self._first_token - self.arrival

    @property
    def finish_reason(self) -> str:
        """Why the choices ended, each reason once, CLIENT_LEFT for some that have not.

        "" after an error.
        """
        if self.error or not self.requests:
            return ""
        num_choices = sum(request.params.n for request in self.requests)
        reasons = [*self._finish_reasons]
        if self._num_finished < num_choices:
            reasons.append(CLIENT_LEFT)
        return ",".join(reasons)

    def go_on_in_background(self) -> None:
        """The client is answered before the engine has ended: `background_ended` comes later."""
        self._is_in_background = True

    def background_ended(self, error: str = "") -> None:
        self._is_in_background = False
        self.error = error
        if self._tell is not None:
            self._tell()

    def answered(self, tell: Callable[[], None]) -> None:
        """The HTTP request is over; have it told of, at once or when its background is."""
        if self._is_in_background:
            self._tell = tell
        else:
            tell()

    def _note_first(self, prompt_index: int, delta: OutputDelta) -> None:
        if delta.index == 0:  # later choices hit what the first one computed
            self._num_cached[prompt_index] = delta.num_cached_tokens
        self.adapter = delta.adapter or self.adapter
        if self._first_token is None:
            self._first_token = time.monotonic()

    def _note_last(self, finish_reason: str, times: AnswerTimes | None) -> None:
        self._finish_reasons.setdefault(finish_reason)
        self._num_finished += 1
        if times is not None:
            self._times.append(times)


def record_of(request: Request) -> RequestRecord:
    """The record of this request, on any route that generates."""
    record = getattr(request.state, STATE_KEY)
    assert isinstance(record, RequestRecord), "a route outside of the Instrumentation middleware"
    return record
