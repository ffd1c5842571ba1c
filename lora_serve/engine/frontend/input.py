"""Turns what a caller asks for into what an engine is told. Checks every limit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import embeds_digest
from lora_serve.messages import EngineReady, EngineRequest
from lora_serve.prompts import EmbedsPrompt, Prompt
from lora_serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Knows the model's limits; holds no request.

    block_size: of the KV cache, for the embeddings' digests. eos_token_ids: the model's end.
    """

    model: EngineReady
    block_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int

    def resolve(self, request: GenerateRequest) -> EngineRequest:
        """What the engine is told of a request that it can answer.

        Raises:
            InvalidRequestError: naming the field, its value and the limit.
        """
        request.params.verify(self.max_logprobs, self.model.vocab_size)
        self._check_prompt(request.prompt)
        params = self._resolve(request.params, request.prompt.num_tokens)
        return EngineRequest(
            msgspec.structs.replace(request, params=params),
            eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
            embeds_digests=self._embeds_digests(request.prompt),
            arrival_time=time.monotonic(),
        )

    def _check_prompt(self, prompt: Prompt) -> None:
        self._check_vocabulary(prompt.token_ids)
        if prompt.num_tokens == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.model.vocab_size):
            token_id = next(t for t in token_ids if not 0 <= t < self.model.vocab_size)
            raise InvalidRequestError(
                f"token id {token_id} is out of vocabulary: the model has {self.model.vocab_size} "
                "tokens",
                "prompt",
            )

    def _resolve(self, params: SamplingParams, num_tokens: int) -> SamplingParams:
        """Fill max_tokens and seed, once prompt and answer are known to fit."""
        num_wanted = params.max_tokens if params.max_tokens is not None else 1
        most_cached = self.model.max_request_tokens
        for limit, what, remedy in (
            (self.model.max_model_len, "the model's context", "shorten them"),
            (most_cached, "the KV cache", "shorten them, or raise --num-gpu-blocks-override"),
        ):
            if num_tokens + num_wanted > limit:
                raise PromptTooLongError(
                    f"the prompt's length is {num_tokens} and max_tokens is {num_wanted}, together "
                    f"{num_tokens + num_wanted}, but {what} holds {limit} tokens; {remedy}",
                    "max_tokens" if num_tokens < limit else "prompt",
                )
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = most_cached - num_tokens
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        return msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed)

    def _embeds_digests(self, prompt: Prompt) -> tuple[bytes, ...]:
        if not isinstance(prompt, EmbedsPrompt):
            return ()
        rows = memoryview(prompt.data)
        block_bytes = len(rows) // prompt.num_tokens * self.block_size
        return tuple(
            embeds_digest(rows[start : start + block_bytes])
            for start in range(0, len(rows), block_bytes)
        )
