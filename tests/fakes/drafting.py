"""A scheduler that plans drafts, wherever they come from, for workers to verify."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from lora_serve.config import SchedulerConfig
from lora_serve.engine.core import core
from lora_serve.scheduler.chunk import scheduled_chunk
from lora_serve.scheduler.progress import RequestProgress
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.step import RequestStepOutput, ScheduledRequest

Drafter = Callable[[Request], Sequence[int]]


@dataclass
class DraftCounts:
    num_accepted: int = 0
    num_rejected: int = 0


class DraftingScheduler(Scheduler):
    """Plans at most half of each step's tokens as ever, which leaves the other half to drafts."""

    def __init__(
        self, drafter: Drafter, counts: DraftCounts, config: SchedulerConfig, *parts: Any
    ) -> None:
        self._drafter = drafter
        self._counts = counts
        self._most_drafts = config.max_num_batched_tokens // 2
        num_batched = config.max_num_batched_tokens - self._most_drafts
        super().__init__(replace(config, max_num_batched_tokens=num_batched), *parts)

    def _plan(self, request: Request, num_tokens: int) -> None:
        drafts = self._drafts(request, num_tokens)
        self._planned.append((request, scheduled_chunk(request, num_tokens, drafts)))

    def _drafts(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        end = request.num_planned_tokens + num_tokens
        if end != request.num_tokens or request.num_pending_tokens or not request.max_tokens:
            return ()
        if request.has_grammar:  # a draft would need a mask for each of its rows
            return ()
        num_free = self._most_drafts - sum(chunk.asked.num_drafts for _, chunk in self._planned)
        drafts = tuple(self._drafter(request))[:num_free]
        return drafts if self._kv.extend(request, end + len(drafts)) else ()

    def _progress(
        self, request: Request, chunk: ScheduledRequest, result: RequestStepOutput
    ) -> RequestProgress:
        if chunk.asked.num_drafts:
            num_accepted = len(result.token_ids) - 1
            self._counts.num_accepted += num_accepted
            self._counts.num_rejected += chunk.asked.num_drafts - num_accepted
        return super()._progress(request, chunk, result)


@contextmanager
def drafting(drafter: Drafter) -> Iterator[DraftCounts]:
    """Engines that are made meanwhile verify what the drafter says."""
    counts = DraftCounts()

    def make(config: SchedulerConfig, *parts: Any) -> DraftingScheduler:
        return DraftingScheduler(drafter, counts, config, *parts)

    with mock.patch.object(core, "Scheduler", make):
        yield counts


def some_drafts(answer: Sequence[int], vocab_size: int, rng: random.Random) -> list[int]:
    """None or a few drafts for an answer: right ones, wrong from one on, or some wrong in between.

    Some go on beyond the answer's end.
    """
    drafts = [*answer[: rng.randrange(6)], *rng.choices(range(vocab_size), k=rng.randrange(2))]
    if drafts and rng.random() < 0.5:
        drafts[rng.randrange(len(drafts))] = rng.randrange(vocab_size)
    return drafts
