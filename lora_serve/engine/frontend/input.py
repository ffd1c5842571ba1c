"""From a prompt and its settings to the requests that an engine takes. Checks every limit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.identity import embeds_digest
from lora_serve.messages import EngineReady, EngineRequest, PromptEmbeds
from lora_serve.prompts import EmbedsPrompt, Prompt, TokensPrompt
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

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        lora_name: str | None,
        cache_salt: str,
        priority: int,
        tenant: str = "",
    ) -> list[EngineRequest]:
        """One request for each of the n choices; choice i draws with seed + i.

        Raises:
            InvalidRequestError: naming the field, its value and the limit.
        """
        params.verify(self.max_logprobs, self.model.vocab_size)
        num_tokens = self._check_prompt(prompt)
        params = self._resolve(params, num_tokens)
        arrival_time = time.monotonic()
        assert params.seed is not None, "the seed was resolved above"
        return [
            EngineRequest(
                request_id=f"{request_id}-{index}",
                token_ids=prompt.token_ids if isinstance(prompt, TokensPrompt) else (),
                sampling_params=msgspec.structs.replace(params, seed=params.seed + index),
                eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
                prompt_embeds=self._embeds(prompt),
                lora_name=lora_name,
                cache_salt=cache_salt,
                priority=priority,
                tenant=tenant,
                arrival_time=arrival_time,
            )
            for index in range(params.n)
        ]

    def _check_prompt(self, prompt: Prompt) -> int:
        """The prompt's length, once it and its tokens are known to be possible."""
        if isinstance(prompt, EmbedsPrompt):
            num_tokens = prompt.num_tokens
        else:
            num_tokens = len(prompt.token_ids)
            self._check_vocabulary(prompt.token_ids)
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
        return num_tokens

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.model.vocab_size):
            token_id = next(t for t in token_ids if not 0 <= t < self.model.vocab_size)
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary of {self.model.vocab_size} tokens",
                "prompt",
            )

    def _resolve(self, params: SamplingParams, num_tokens: int) -> SamplingParams:
        """Fill max_tokens and seed, once prompt and answer are known to fit."""
        num_wanted = params.max_tokens if params.max_tokens is not None else 1
        num_pool_tokens = self.model.num_blocks * self.block_size
        for limit, what, remedy in (
            (self.model.max_model_len, "the model's context", "shorten them"),
            (num_pool_tokens, "the KV cache", "shorten them, or raise --num-gpu-blocks-override"),
        ):
            if num_tokens + num_wanted > limit:
                raise PromptTooLongError(
                    f"the prompt's length is {num_tokens} and max_tokens is {num_wanted}, together "
                    f"{num_tokens + num_wanted}, but {what} holds {limit} tokens; {remedy}",
                    "max_tokens" if num_tokens < limit else "prompt",
                )
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = min(self.model.max_model_len, num_pool_tokens) - num_tokens
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        return msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed)

    def _embeds(self, prompt: Prompt) -> PromptEmbeds | None:
        if not isinstance(prompt, EmbedsPrompt):
            return None
        rows = memoryview(prompt.data)
        block_bytes = len(rows) // prompt.num_tokens * self.block_size
        digests = tuple(
            embeds_digest(rows[start : start + block_bytes])
            for start in range(0, len(rows), block_bytes)
        )
        return PromptEmbeds(prompt.num_tokens, prompt.data, digests)
