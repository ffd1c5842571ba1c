"""What a finished step means for one request, as the engine is told of it."""

from __future__ import annotations

import msgspec

from lora_serve.scheduler.request import Request
from lora_serve.scheduler.stop import finish_after
from lora_serve.step import RequestStepOutput, ScheduledRequest, TokenLogprobs


class RequestProgress(msgspec.Struct, frozen=True, gc=False):
    """finish_reason: set with a request's last progress."""

    request: Request
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None


def take_in(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> tuple[tuple[int, ...], str | None, int | None]:
    """Write down on the request what its part of a step came to.

    Returns the new tokens, up to the first that ends the answer, and how it ends, as of
    `finish_after`.
    """
    token_ids, num_samples = result.token_ids, len(chunk.asked.samples)
    request.num_computed_tokens = chunk.end - num_samples + len(token_ids)
    if num_samples:
        request.num_pending_tokens -= 1
    if num_samples <= 1:  # the usual case
        for token_id in token_ids:
            request.append(token_id)
        return token_ids, *finish_after(request)
    request.num_planned_tokens = request.num_computed_tokens  # no later step knows of drafts
    for count, token_id in enumerate(token_ids, 1):
        request.append(token_id)
        finish_reason, stop_token_id = finish_after(request)
        if finish_reason is not None:
            # Accepted drafts behind the end are no tokens of the request.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
            return token_ids[:count], finish_reason, stop_token_id
    return token_ids, None, None


def fresh_prompt_logprobs(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> tuple[TokenLogprobs, ...]:
    """A step's prompt logprobs without those that were told before a preemption; counts them."""
    num_told = request.num_prompt_logprobs
    fresh = result.prompt_logprobs[max(0, num_told - chunk.start) :]
    request.num_prompt_logprobs = num_told + len(fresh)
    return fresh
