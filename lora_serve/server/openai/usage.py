"""Counts the tokens of an answer, and notes which weights gave it and how long that took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from lora_serve.identity import AdapterRef, NoAdapter
from lora_serve.outputs import AnswerTimes, OutputDelta, RequestOutput
from lora_serve.server.openai.answers import (
    CompletionTokensDetails,
    PromptTokensDetails,
    RequestMetrics,
    Usage,
)
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import system_fingerprint


class UsageCounter:
    """Counts over all prompts of a body, with each delta.

    A prompt counts once, however many choices continue it, and so do its cached tokens: those
    that its first choice found.
    """

    def __init__(
        self,
        model_fingerprint: bytes,
        inputs: Sequence[Input],
        *,
        tells_times: bool = False,
        tells_reasoning: bool = False,
    ) -> None:
        """Count nothing so far.

        tells_times: whether `metrics` gives any, as --enable-per-request-metrics asks.
        tells_reasoning: whether the usage says how many tokens were reasoning, as a chat's does.
        """
        self._model_fingerprint = model_fingerprint
        self._tells_times = tells_times
        self._times: list[AnswerTimes] = []  # of the choices that have ended
        self._num_prompt_tokens = sum(item.num_tokens for item in inputs)
        self._num_cached_tokens = [0] * len(inputs)
        self._num_cached_by_tier: list[dict[str, int]] = [{} for _ in inputs]
        self._num_output_tokens = 0
        self._tells_reasoning = tells_reasoning
        self._num_reasoning_tokens = 0
        self._num_accepted_drafts = self._num_rejected_drafts = 0
        self._adapters: dict[AdapterRef | NoAdapter, None] = {}  # in the order of their appearance

    def add(self, prompt_index: int, delta: OutputDelta) -> None:
        self._num_output_tokens += len(delta.token_ids)
        self._note_drafts(delta)
        if delta.times is not None:
            self._times.append(delta.times)
        self.note_prompt(prompt_index, delta)

    def add_reasoning(self, num_tokens: int) -> None:
        """So many of the tokens that are counted anyway were reasoning."""
        self._num_reasoning_tokens += num_tokens

    def note_prompt(self, prompt_index: int, delta: OutputDelta) -> None:
        """Take in what a delta says of its prompt; its tokens are not counted."""
        if delta.index == 0:
            self._num_cached_tokens[prompt_index] = delta.num_cached_tokens
            self._num_cached_by_tier[prompt_index] = delta.num_cached_by_tier
        self._note_version(delta.adapter)

    def add_output(self, prompt_index: int, output: RequestOutput) -> None:
        self._num_output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self._note_drafts(output)
        if output.times is not None:
            self._times += [output.times] * len(output.outputs)
        self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        self._num_cached_by_tier[prompt_index] = output.num_cached_by_tier
        self._note_version(output.version)

    def _note_version(self, adapter: AdapterRef | NoAdapter | None) -> None:
        if adapter is not None:
            self._adapters.setdefault(adapter)

    def _note_drafts(self, answer: OutputDelta | RequestOutput) -> None:
        self._num_accepted_drafts += answer.num_accepted_drafts
        self._num_rejected_drafts += answer.num_rejected_drafts

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the version that answered; of each, if several did, "" if none."""
        return ",".join(self.fingerprint_of(adapter) for adapter in self._adapters)

    def fingerprint_of(self, adapter: AdapterRef | NoAdapter | None) -> str:
        return system_fingerprint(self._model_fingerprint, adapter)

    @property
    def metrics(self) -> RequestMetrics | None:
        """How long the answer took, once it has ended; None for several, or if not asked for."""
        if not (self._tells_times and len(self._times) == 1):
            return None
        return request_metrics(self._times[0], self._num_output_tokens)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=self._num_prompt_tokens + self._num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(
                sum(self._num_cached_tokens), _sums(self._num_cached_by_tier)
            ),
            completion_tokens_details=self._details,
        )

    @property
    def _details(self) -> CompletionTokensDetails | UnsetType:
        has_drafts = bool(self._num_accepted_drafts or self._num_rejected_drafts)
        if not (self._tells_reasoning or has_drafts):
            return UNSET
        return CompletionTokensDetails(
            self._num_reasoning_tokens if self._tells_reasoning else UNSET,
            self._num_accepted_drafts if has_drafts else UNSET,
            self._num_rejected_drafts if has_drafts else UNSET,
        )


def request_metrics(times: AnswerTimes, num_tokens: int) -> RequestMetrics:
    """num_tokens: of the answer."""
    generation = times.last_token - times.first_token
    inference = times.last_token - times.scheduled
    return RequestMetrics(
        time_to_first_token_ms=1000 * (times.first_token - times.scheduled),
        generation_time_ms=1000 * generation,
        queue_time_ms=1000 * (times.scheduled - times.arrival),
        mean_itl_ms=1000 * generation / (num_tokens - 1) if num_tokens > 1 else None,
        tokens_per_second=num_tokens / inference if inference > 0 else None,
    )


def _sums(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sum of each key's counts; keys in the order of their appearance."""
    sums: dict[str, int] = {}
    for count in counts:
        for key, value in count.items():
            sums[key] = sums.get(key, 0) + value
    return sums
