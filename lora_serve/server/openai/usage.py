"""Counts the tokens of an answer, and notes which weights gave it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lora_serve.identity import AdapterRef, NoAdapter
from lora_serve.outputs import OutputDelta, RequestOutput
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import system_fingerprint
from lora_serve.server.openai.responses import PromptTokensDetails, Usage


class UsageCounter:
    """Over all prompts of a body; grows with each delta.

    A prompt counts once, however many choices continue it, and so do its cached tokens: those
    that its first choice found.
    """

    def __init__(self, model_fingerprint: bytes, inputs: Sequence[Input]) -> None:
        self._model_fingerprint = model_fingerprint
        self._num_prompt_tokens = sum(item.num_tokens for item in inputs)
        self._num_cached_tokens = [0] * len(inputs)
        self._num_cached_by_tier: list[dict[str, int]] = [{} for _ in inputs]
        self._num_output_tokens = 0
        self._adapters: dict[AdapterRef | NoAdapter, None] = {}  # in the order of their appearance

    def add(self, prompt_index: int, delta: OutputDelta) -> None:
        self._num_output_tokens += len(delta.token_ids)
        self.note_prompt(prompt_index, delta)

    def note_prompt(self, prompt_index: int, delta: OutputDelta) -> None:
        """Take in what a delta says of its prompt; its tokens are not counted."""
        if delta.index == 0:
            self._num_cached_tokens[prompt_index] = delta.num_cached_tokens
            self._num_cached_by_tier[prompt_index] = delta.num_cached_by_tier
        self._adapters.setdefault(delta.adapter)

    def add_output(self, prompt_index: int, output: RequestOutput) -> None:
        self._num_output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        self._num_cached_by_tier[prompt_index] = output.num_cached_by_tier
        self._adapters.setdefault(output.adapter)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the version that answered; of each, if several did."""
        return ",".join(self.fingerprint_of(adapter) for adapter in self._adapters)

    def fingerprint_of(self, adapter: AdapterRef | NoAdapter) -> str:
        return system_fingerprint(self._model_fingerprint, adapter)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=self._num_prompt_tokens + self._num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(
                sum(self._num_cached_tokens), _sums(self._num_cached_by_tier)
            ),
        )


def _sums(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """By key, over all; keys in the order of their appearance."""
    sums: dict[str, int] = {}
    for count in counts:
        for key, value in count.items():
            sums[key] = sums.get(key, 0) + value
    return sums
