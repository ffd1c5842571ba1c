"""What a generation gives its caller: deltas as they come, and the whole once finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """When an answer came and went: seconds of one monotonic clock.

    scheduled: its first step. first_token, last_token: when the tokens had become text.
    """

    arrival: float
    scheduled: float
    first_token: float
    last_token: float


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """What is new for one of a prompt's n choices.

    index: which choice. text: decoded, with stop strings already cut off.
    finish_reason: "stop", "length" or "abort" on the choice's last delta, else None.
    stop_reason: the stop string or stop token id that ended it, None for an end token.
    num_cached_tokens, num_cached_by_tier, adapter: on every delta, once known; the tiers are those
        beyond the device cache, which is "device", and empty if there are none. The adapter is None
        where none of its versions answered, because no engine had the request.
    prompt_logprobs: of the prompt tokens asked for, from the second on; on the first delta only.
    embedding: what was asked for instead of an answer, little-endian float32.
    num_accepted_drafts, num_rejected_drafts: guesses of tokens that were verified since the delta
        before. One behind the end of the answer counts as rejected.
    times: on the choice's last delta. num_stored_tokens: of the prompt, those that other servers
        find, on the last delta where that was asked for.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    num_cached_by_tier: dict[str, int] = {}
    adapter: AdapterRef | NoAdapter | None = BASE_MODEL
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes = b""
    times: AnswerTimes | None = None
    num_stored_tokens: int | None = None
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0

    @property
    def num_logprobs(self) -> int:
        if not (self.prompt_logprobs or self.logprobs):
            return 0  # asked several times for each token, most often of none
        return count_logprobs(self.prompt_logprobs) + count_logprobs(self.logprobs)


def count_logprobs(positions: Iterable[TokenLogprobs]) -> int:
    """The tokens and all their alternatives: what it takes to hold and to write them."""
    return sum(len(position.top) + 1 for position in positions)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt's embedding; with pooling_type ALL those of its tokens, one after the other.

    adapter: the version that gave it, None for the base model.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int
    adapter: AdapterRef | None


@dataclass(slots=True)
class CompletionOutput:
    """One finished (or growing) choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def delta(self) -> OutputDelta:
        """All of the choice, as if it had come at once."""
        return OutputDelta(
            self.index,
            self.text,
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.finish_reason,
            self.stop_reason,
        )


@dataclass(slots=True)
class RequestOutput:
    """All choices of one prompt. `add` folds deltas in, in the order they come.

    version: as a delta's adapter. adapter: the same, but None for the base model, as in `LLM`'s
        arguments.
    embedding: little-endian float32; b"" where an answer was asked for.
    num_accepted_drafts, num_rejected_drafts: of all choices.
    times: of the choice that ended last, once all have. num_stored_tokens: as of `OutputDelta`.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_choices: int = 1
    num_cached_tokens: int = 0
    num_cached_by_tier: dict[str, int] = field(default_factory=dict)
    version: AdapterRef | NoAdapter | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: bytes = b""
    times: AnswerTimes | None = None
    num_stored_tokens: int | None = None
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    outputs: list[CompletionOutput] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = [CompletionOutput(index) for index in range(self.num_choices)]

    @property
    def adapter(self) -> AdapterRef | None:
        return None if self.version is BASE_MODEL else self.version

    def add(self, delta: OutputDelta) -> None:
        choice = self.outputs[delta.index]
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
        if delta.index == 0:  # later choices hit what the first one computed
            self.num_cached_tokens = delta.num_cached_tokens
            self.num_cached_by_tier = delta.num_cached_by_tier
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.embedding += delta.embedding
        self.version = delta.adapter
        self.times = delta.times or self.times
        self.num_accepted_drafts += delta.num_accepted_drafts
        self.num_rejected_drafts += delta.num_rejected_drafts
        if delta.num_stored_tokens is not None:
            self.num_stored_tokens = delta.num_stored_tokens
