"""What a finished step means for one request, as the engine is told of it."""

from __future__ import annotations

import msgspec

from lora_serve.scheduler.request import Request
from lora_serve.scheduler.stop import finish_after
from lora_serve.step import RequestStepOutput, ScheduledRequest, TokenLogprobs


class RequestProgress(msgspec.Struct, frozen=True, gc=False):
    """What there is to tell of a request.

    pooled: what `pooling.embedding` takes. finish_reason: set with a request's last progress.
    """

    request: Request
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    finish_reason: str | None = None
    stop_token_id: int | None = None


def progress_of(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> RequestProgress:
    """Write down on the request what its part of a step came to, and what there is to tell."""
    new_token_ids, finish_reason, stop_token_id = take_in(request, chunk, result)
    return RequestProgress(
        request,
        new_token_ids,
        result.logprobs[: len(new_token_ids)],
        _fresh_prompt_logprobs(request, chunk, result) if result.prompt_logprobs else (),
        (request.hidden_sums or result.pooled) if finish_reason is not None else b"",
        finish_reason,
        stop_token_id,
    )


def take_in(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> tuple[tuple[int, ...], str | None, int | None]:
    """Write the step's part down on the request.

    Returns the new tokens, up to the first that ends the answer, and how it ends, as of
    `finish_after`.
    """
    token_ids, num_samples = result.token_ids, len(chunk.asked.samples)
    request.num_computed_tokens = chunk.end - num_samples + len(token_ids)
    if result.hidden_sums:
        request.add_hidden_sums(result.hidden_sums)
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


def _fresh_prompt_logprobs(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> tuple[TokenLogprobs, ...]:
    """A step's prompt logprobs without those that were told before a preemption; counts them."""
    position, scoring = request.next_scored_position, chunk.asked.scoring
    if position is None or scoring is None:
        return ()
    fresh = result.prompt_logprobs[max(0, position - chunk.start - scoring.first_row) :]
    request.num_prompt_logprobs += len(fresh)
    return fresh
