"""A request's part of a step, as the worker sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat

from lora_serve.pooling import PoolingParams
from lora_serve.prompts import NO_ROWS, rows_between
from lora_serve.scheduler.request import Request
from lora_serve.step import (
    NOTHING_ASKED,
    NOTHING_SEEN,
    AskedOutputs,
    PromptScoring,
    SampleInput,
    ScheduledRequest,
    SeenTokens,
)


def scheduled_chunk(
    request: Request, num_tokens: int, draft_token_ids: tuple[int, ...] = ()
) -> ScheduledRequest:
    """The next `num_tokens` tokens of a request that has the blocks for them.

    draft_token_ids: to be verified behind the last token there is, which must be known.
    """
    start = request.num_scheduled_tokens
    known_end = start + num_tokens
    end = known_end + len(draft_token_ids)
    num_blocks = -(-end // request.block_size)
    num_known = len(request.token_ids)
    is_pending = start == num_known
    is_last = known_end == num_known + request.num_pending_tokens
    assert not draft_token_ids or (is_last and not is_pending), "drafts before the last known token"
    token_ids: Sequence[int] = (0,) if is_pending else request.token_ids[start:known_end]
    samples: tuple[SampleInput, ...] = ()
    if draft_token_ids:
        token_ids = (*token_ids, *draft_token_ids)
        samples = _draft_samples(request, known_end, draft_token_ids)
    elif is_last and request.max_tokens:
        samples = (_sample_input(request, known_end),)
    if request.pooling is not None:
        asked = _pooling_asked(request.pooling, num_tokens, is_last)
    elif request.params.prompt_logprobs is None:  # the usual case
        asked = AskedOutputs(samples)
    else:
        asked = AskedOutputs(samples, _scoring(request, start, end))
    block_tables: Sequence[Sequence[int]]
    if len(request.block_tables) == 1:  # the usual case
        block_tables = (request.block_tables[0].block_ids[:num_blocks],)
    else:
        block_tables = [table.block_ids[:num_blocks] for table in request.block_tables]
    return ScheduledRequest(
        request.request_id,
        request.namespace.adapter,
        start,
        token_ids,
        block_tables,
        asked,
        NO_ROWS if (prompt := request.prompt_embeds) is None else rows_between(prompt, start, end),
        request.step_index if is_pending else None,
        request.adapter_start,
    )


def _draft_samples(
    request: Request, position: int, draft_token_ids: Sequence[int]
) -> tuple[SampleInput, ...]:
    """What sampling the token at `position` needs, and each behind one of the drafts there."""
    all_seen: Iterable[SeenTokens] = repeat(NOTHING_SEEN)
    if request.counts:  # each is a copy, of the one before with a draft more
        all_seen = accumulate(draft_token_ids, SeenTokens.and_drawn, initial=request.counts.seen())
    return tuple(
        _sample_input(request, position + count, draft_token_ids[:count], seen)
        for count, seen in zip(range(len(draft_token_ids) + 1), all_seen, strict=False)
    )


def _sample_input(
    request: Request,
    position: int,
    drafts: Sequence[int] = (),
    seen: SeenTokens | None = None,
) -> SampleInput:
    """drafts: those before `position`. seen: with these; not needed where there are none."""
    if request.is_plain:
        return SampleInput(request.params, request.seed, position)  # the usual case, once a token
    if seen is None:
        seen = request.counts.seen() if request.counts else NOTHING_SEEN
    return SampleInput(
        params=request.params,
        seed=request.seed,
        position=position,
        seen=seen,
        banned_token_ids=request.banned_token_ids(position, drafts),
        bitmask=_bitmask_behind(request, len(drafts)),
    )


def _bitmask_behind(request: Request, num_drafts: int) -> bytes | None:
    """What may be sampled behind so many drafts."""
    if not (num_drafts and request.is_constrained):
        return request.bitmask
    assert request.masked_drafts is not None, "a draft is verified without its mask"
    return request.masked_drafts.bitmask_behind(num_drafts)


def _pooling_asked(pooling: PoolingParams, num_tokens: int, is_last: bool) -> AskedOutputs:
    """num_tokens: of the chunk."""
    if pooling.pooling_type == "MEAN":
        return AskedOutputs(sums_hidden=True)
    if pooling.pooling_type == "ALL":
        return AskedOutputs(num_pooled=num_tokens)
    return AskedOutputs(num_pooled=1) if is_last else NOTHING_ASKED


def _scoring(request: Request, start: int, end: int) -> PromptScoring | None:
    """The prompt tokens asked for that the chunk's rows predict, if there are any."""
    position = request.next_scored_position
    if position is None:
        return None
    first = max(start, position)
    targets = request.token_ids[first + 1 : min(end + 1, request.num_prompt_tokens)]
    if not targets:
        return None
    return PromptScoring(targets, request.params.prompt_logprobs or 0, first - start)
