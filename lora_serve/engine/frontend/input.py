"""Turns what a caller asks for into what an engine is told. Checks every limit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lora_serve.bitmask import allows_any
from lora_serve.engine.frontend.bad_words import BadWordEncoder
from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineReady, EngineRequest, TokenRules
from lora_serve.prompts import Prompt, embeds_digests, verify_vocabulary
from lora_serve.sampling_params import SamplingParams

NO_THINKING = (
    "thinking_token_budget needs one token each that begins and ends the reasoning, as the chat "
    "template or --reasoning-parser tells, and a grammar that waits for its end; leave it out"
)


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Knows the model's limits; holds no request.

    block_size: of the KV cache, for the embeddings' digests. eos_token_ids: the model's end.
    bad_words: makes token ids of them.
    """

    model: EngineReady
    block_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    max_n: int
    bad_words: BadWordEncoder

    def resolve(self, request: GenerateRequest) -> EngineRequest:
        """What the engine is told of a request that it can answer.

        Raises:
            InvalidRequestError: naming the field, its value and the limit.
        """
        request.params.verify(self.max_logprobs, self.model.vocab_size, self.max_n)
        self._check_prompt(request.prompt)
        if request.pooling is not None:
            request.pooling.verify(self.model.hidden_size, request.prompt.num_tokens)
        params = self._resolve(request.params, request.prompt.num_tokens)
        eos_token_ids = () if params.ignore_eos else self.eos_token_ids
        rules = TokenRules(
            request.params.allowed_bitmask, self.bad_words.token_ids(request.params.bad_words)
        )
        _check_rules(rules, params, eos_token_ids)
        return EngineRequest(
            msgspec.structs.replace(request, params=params),
            eos_token_ids=eos_token_ids,
            embeds_digests=embeds_digests(request.prompt, self.block_size),
            arrival_time=time.monotonic(),
            rules=rules,
        )

    def _check_prompt(self, prompt: Prompt) -> None:
        verify_vocabulary(prompt.token_ids, self.model.vocab_size, "prompt")
        if prompt.num_tokens == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")

    def _resolve(self, params: SamplingParams, num_tokens: int) -> SamplingParams:
        """Fill what depends on the prompt, and the seed, once prompt and answer fit."""
        num_wanted = params.max_tokens if params.max_tokens is not None else 1
        if params.thinking_token_budget is not None and params.reasoning is None:
            raise InvalidRequestError(NO_THINKING, "thinking_token_budget")
        most_cached = self.model.max_request_tokens
        for limit, what, remedy in (
            (self.model.max_model_len, "the model's context", "shorten them"),
            (most_cached, "the KV cache", "shorten them, or raise --num-gpu-blocks-override"),
        ):
            if num_tokens + num_wanted > limit:
                told = f"the prompt's length is {num_tokens}"
                if num_wanted:
                    told += f" and max_tokens is {num_wanted}, together {num_tokens + num_wanted}"
                raise PromptTooLongError(
                    f"{told}, but {what} holds {limit} tokens; {remedy}",
                    "max_tokens" if num_tokens < limit else "prompt",
                )
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = most_cached - num_tokens
        return msgspec.structs.replace(
            params.with_num_logprobs(self.model.vocab_size),
            max_tokens=max_tokens,
            seed=params.seed if params.seed is not None else secrets.randbits(62),
            prompt_logprob_start=_scored_start(params, num_tokens),
            prompt_logprobs_last_n=None,
            allowed_token_ids=None,
            bad_words=(),
        )


def _scored_start(params: SamplingParams, num_tokens: int) -> int:
    """The first position of a prompt that gives a prompt logprob.

    Raises:
        InvalidRequestError: it is behind the prompt.
    """
    if params.prompt_logprobs_last_n is not None:
        return max(0, num_tokens - 1 - params.prompt_logprobs_last_n)
    if params.prompt_logprob_start >= num_tokens:
        raise InvalidRequestError(
            f"prompt_logprob_start {params.prompt_logprob_start} is behind the prompt, which has "
            f"{num_tokens} tokens; lower it",
            "prompt_logprob_start",
        )
    return params.prompt_logprob_start


def _check_rules(rules: TokenRules, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Raise InvalidRequestError if what is forbidden could be all that is allowed."""
    if rules.allowed is None:
        return
    forbidden = {word[-1] for word in rules.bad_words}
    if params.min_tokens:
        forbidden.update(eos_token_ids, params.stop_token_ids)
    if not allows_any(rules.allowed, list(forbidden)):
        raise InvalidRequestError(
            "allowed_token_ids names no token but ends of bad_words, and of the answer with "
            f"min_tokens {params.min_tokens}; allow another one",
            "allowed_token_ids",
        )
