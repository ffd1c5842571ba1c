"""A request's share of a step, as the worker sees it."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.scheduler.request import Request
from lora_serve.step import NOTHING_SEEN, SampleInput, ScheduledRequest


def scheduled_chunk(request: Request, num_tokens: int) -> ScheduledRequest:
    """The next `num_tokens` tokens of a request that has the blocks for them."""
    start, end = request.num_planned_tokens, request.num_planned_tokens + num_tokens
    num_blocks = -(-end // request.block_size)
    is_awaited = start == request.num_tokens
    is_last = end == request.num_tokens + request.num_awaited_tokens
    return ScheduledRequest(
        request_id=request.request_id,
        adapter=request.namespace.adapter,
        start=start,
        token_ids=(0,) if is_awaited else request.token_ids[start:end],
        block_ids=request.block_ids[:num_blocks],
        sample=_sample_input(request, end) if is_last and request.max_tokens > 0 else None,
        embeds=_embeds_rows(request, start, end),
        num_prompt_logprobs=request.params.prompt_logprobs or 0,
        prompt_logprob_targets=_prompt_logprob_targets(request, start, end),
        token_from=request.step_index if is_awaited else None,
    )


def _sample_input(request: Request, position: int) -> SampleInput:
    params = request.params
    if not (params.has_penalties or params.min_tokens):  # the usual case, once a token
        return SampleInput(params, request.seed, position)
    is_short = position - request.num_prompt_tokens < params.min_tokens
    return SampleInput(
        params=params,
        seed=request.seed,
        position=position,
        seen=request.counts.seen() if request.counts else NOTHING_SEEN,
        banned_token_ids=(*request.eos_token_ids, *params.stop_token_ids) if is_short else (),
    )


def _embeds_rows(request: Request, start: int, end: int) -> bytes:
    embeds = request.prompt_embeds
    if embeds is None or start >= embeds.num_tokens:
        return b""
    row_bytes = len(embeds.data) // embeds.num_tokens
    return embeds.data[start * row_bytes : min(end, embeds.num_tokens) * row_bytes]


def _prompt_logprob_targets(request: Request, start: int, end: int) -> Sequence[int]:
    """The prompt tokens that the chunk's rows predict."""
    if not request.needs_whole_prompt:
        return ()
    return request.token_ids[start + 1 : min(end + 1, request.num_prompt_tokens)]
