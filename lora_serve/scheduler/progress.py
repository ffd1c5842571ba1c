"""What a finished step means for one request, as the engine is told of it."""

from __future__ import annotations

import msgspec

from lora_serve.scheduler.request import Request
from lora_serve.step import RequestStepOutput, ScheduledRequest, TokenLogprobs


class RequestProgress(msgspec.Struct, frozen=True, gc=False):
    """finish_reason: set with a request's last progress."""

    request: Request
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None


def fresh_prompt_logprobs(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> tuple[TokenLogprobs, ...]:
    """A step's prompt logprobs without those that were told before a preemption; counts them."""
    if not result.prompt_logprobs:
        return ()
    num_told = request.num_prompt_logprobs
    fresh = result.prompt_logprobs[max(0, num_told - chunk.start) :]
    request.num_prompt_logprobs = num_told + len(fresh)
    return fresh
