"""Requests that are being answered: where their deltas go, and what is asked of a new engine again.

A request that has told its caller nothing yet can be sent again to another engine, with the same
answer to the bit; one that has begun to tell cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from lora_serve.engine.frontend.mailbox import Mailbox
from lora_serve.errors import LoraServeError, RequestAbortedError, SlowReaderError
from lora_serve.identity import BASE_MODEL
from lora_serve.messages import EngineRequest
from lora_serve.outputs import OutputDelta

EMBEDDING_ABORTED = "this request for an embedding was aborted by a call; send it again"
MAX_WAITING_LOGPROBS = 2**19  # of a streamed request; each takes about 120 bytes
LOST_TOKENS = 2  # an engine may have sampled so many more than were heard of before it died


@dataclass(slots=True, eq=False)
class RequestState:
    """One prompt's choices, and the deltas that wait for its caller.

    max_backlog: how many deltas of a streamed request may wait.
    is_sent: an engine has been sent it. num_deaths: engines that died with it, since it last got
        past the place where one did.
    """

    message: EngineRequest
    max_backlog: int
    num_growing: int = field(init=False)
    has_begun: bool = False
    is_sent: bool = False
    num_deaths: int = 0
    _deltas: Mailbox[OutputDelta | LoraServeError] = field(default_factory=Mailbox)
    _num_logprobs: int = 0  # of these deltas, with alternatives
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _num_tokens: list[int] = field(init=False)  # by choice, as the next two
    _num_tokens_at_death: list[int] = field(init=False)
    _is_finished: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._num_tokens_at_death = [0] * self.num_choices
        self._begin()

    @property
    def is_streamed(self) -> bool:
        """The caller takes deltas as they come; else all at once, when there are no more."""
        return self.message.request.is_streamed

    @property
    def num_choices(self) -> int:
        return self.message.request.params.n

    @property
    def choice_ids(self) -> list[str]:
        return self.message.choice_ids

    @property
    def is_over(self) -> bool:
        """Its last delta, or its error, waits for the caller or has been taken."""
        return self._over.is_set()

    @property
    def num_tokens_at_death(self) -> int:
        """How far the choices had come, together, when an engine last died with them."""
        return sum(self._num_tokens_at_death)

    @property
    def is_past_its_death(self) -> bool:
        """Every choice has surely come further than where an engine last died with it."""
        return self.num_deaths > 0 and all(
            is_finished or now > then + LOST_TOKENS
            for is_finished, now, then in zip(
                self._is_finished, self._num_tokens, self._num_tokens_at_death, strict=True
            )
        )

    def num_tokens(self, index: int) -> int:
        """How many tokens this choice has told."""
        return self._num_tokens[index]

    def put(self, delta: OutputDelta) -> bool:
        """Keep a delta for the caller; False when too many wait already, which ends the request."""
        if self.is_streamed and (error := self._backlog_error()) is not None:
            self.fail(error)
            return False
        self._num_logprobs += delta.num_logprobs
        self._deltas.put(delta)
        self._num_tokens[delta.index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._is_finished[delta.index] = True
            self.num_growing -= 1
        if not self.num_growing:
            self._over.set()
        return True

    def _backlog_error(self) -> SlowReaderError | None:
        if len(self._deltas.items) >= self.max_backlog:
            return SlowReaderError(
                f"{self.max_backlog} pieces of the answer wait to be read; it was given up. "
                "Read faster, or raise --max-stream-backlog"
            )
        if self._num_logprobs >= MAX_WAITING_LOGPROBS:
            return SlowReaderError(
                f"{self._num_logprobs} log-probabilities of the answer wait to be read, at most "
                f"{MAX_WAITING_LOGPROBS} may; it was given up. Read faster, or ask for fewer"
            )
        return None

    def fail(self, error: LoraServeError) -> None:
        """The caller gets this after what waits for it; a caller who gets all at once, only it.

        A request that is over does not fail any more.
        """
        if self.is_over:
            return
        if not self.is_streamed:
            self._discard_deltas()
        self._deltas.put(error)
        self._over.set()

    async def get(self) -> OutputDelta:
        """The next delta. Raises the error that ended the request."""
        if not self.is_streamed:
            await self._over.wait()
        delta = await self._deltas.get()
        if isinstance(delta, LoraServeError):
            raise delta
        self._num_logprobs -= delta.num_logprobs
        self.has_begun = True
        return delta

    def take_unread(self) -> list[OutputDelta]:
        """What waits for the caller, who will not take it."""
        waiting = [delta for delta in self._deltas.items if isinstance(delta, OutputDelta)]
        self._deltas.items.clear()
        return waiting

    def note_death(self) -> None:
        """The engine that had it has died."""
        if self.is_past_its_death:
            self.num_deaths = 0
        self.num_deaths += 1
        both = zip(self._num_tokens_at_death, self._num_tokens, strict=True)
        self._num_tokens_at_death = [max(tokens) for tokens in both]

    def rewind(self) -> None:
        """Forget an answer of which the caller has seen nothing; it begins again."""
        self._discard_deltas()
        self._begin()

    def end_unsent(self) -> None:
        """End a request that no engine has: its choices are empty, with finish_reason "abort".

        An embedding is told whole or not at all, so a request for one fails.
        """
        asked = self.message.request
        if asked.pooling is not None:
            self.fail(RequestAbortedError(EMBEDDING_ABORTED))
            return
        version = BASE_MODEL if asked.lora_name is BASE_MODEL else None
        for index in range(self.num_choices):
            self.put(OutputDelta(index, finish_reason="abort", adapter=version))

    def leave(self) -> None:
        """The caller is gone."""
        self._over.set()

    def _begin(self) -> None:
        self.is_sent = False
        self.num_growing = self.num_choices
        self._num_tokens = [0] * self.num_choices
        self._is_finished = [False] * self.num_choices

    def _discard_deltas(self) -> None:
        self._deltas.items.clear()
        self._num_logprobs = 0


class RequestStates:
    """All requests that are being answered, by their choices' ids."""

    def __init__(self) -> None:
        self._by_choice_id: dict[str, RequestState] = {}

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate over each once, oldest first."""
        return iter(dict.fromkeys(self._by_choice_id.values()))

    def get(self, choice_id: str) -> RequestState | None:
        return self._by_choice_id.get(choice_id)

    def add(self, state: RequestState) -> None:
        self._by_choice_id.update((choice_id, state) for choice_id in state.choice_ids)

    def remove(self, state: RequestState) -> None:
        """Forget a request whose caller is gone."""
        state.leave()
        for choice_id in state.choice_ids:
            del self._by_choice_id[choice_id]

    def fail_all(self, error: LoraServeError) -> None:
        for state in self:
            state.fail(error)
