"""What a finished step means for one request, as the engine is told of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lora_serve.scheduler.request import Request
from lora_serve.scheduler.stop import finish_after
from lora_serve.step import RequestStepOutput, ScheduledRequest, TokenLogprobs


class RequestProgress(msgspec.Struct, frozen=True, gc=False):
    """What there is to tell of a request.

    pooled: what `pooling.embedding` takes. finish_reason: set with a request's last progress.
    num_accepted_drafts, num_rejected_drafts: that the step verified. What was drawn behind the end
        of the answer counts as rejected.
    """

    request: Request
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


def progress_of(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> RequestProgress:
    """Write down on the request what its part of a step came to, and what there is to tell."""
    samples = chunk.asked.samples
    if len(samples) > 1:
        return _progress_with_drafts(request, chunk, result)
    if result.hidden_sums:
        request.add_hidden_sums(result.hidden_sums)
    if result.pooled:
        request.hidden_rows += result.pooled
    request.num_computed_tokens = chunk.end
    if samples:
        request.num_pending_tokens -= 1
        request.append(result.token_ids[0])
    finish_reason, stop_token_id = finish_after(request)
    return RequestProgress(
        request,
        result.token_ids,
        result.logprobs,
        _fresh_prompt_logprobs(request, chunk, result) if result.prompt_logprobs else (),
        (request.hidden_sums or request.hidden_rows) if finish_reason is not None else b"",
        finish_reason,
        stop_token_id,
    )


def _progress_with_drafts(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> RequestProgress:
    new_token_ids, finish_reason, stop_token_id = take_in_drafts(request, chunk, result)
    num_accepted = num_accepted_drafts(chunk, new_token_ids)
    return RequestProgress(
        request,
        new_token_ids,
        result.logprobs[: len(new_token_ids)],
        _fresh_prompt_logprobs(request, chunk, result),
        b"",
        finish_reason,
        stop_token_id,
        num_accepted,
        chunk.asked.num_drafts - num_accepted,
    )


def num_accepted_drafts(chunk: ScheduledRequest, new_token_ids: Sequence[int]) -> int:
    """How many of a chunk's drafts are tokens of the answer."""
    pairs = zip(chunk.draft_token_ids, new_token_ids, strict=False)
    return sum(draft == token_id for draft, token_id in pairs)


def take_in_drafts(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> tuple[tuple[int, ...], str | None, int | None]:
    """Write down on the request what a step with drafts drew for it.

    Returns the new tokens, up to the first that ends the answer, and how it ends, as of
    `finish_after`.
    """
    token_ids = result.token_ids
    request.num_computed_tokens = chunk.end - len(chunk.asked.samples) + len(token_ids)
    request.num_pending_tokens -= 1
    request.num_scheduled_tokens = request.num_computed_tokens  # no later step knows of drafts
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
