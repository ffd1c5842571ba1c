"""Engines whose steps verify drafts that tests make up, through the engine's own `Drafting`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lora_serve.engine.core import core
from lora_serve.scheduler.drafted import DraftedRequest
from lora_serve.scheduler.drafting import Drafting
from lora_serve.scheduler.progress import RequestProgress
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.totals import SchedulerTotals
from lora_serve.speculation.ngram import NgramDrafter
from lora_serve.speculation.pace import DraftPace
from lora_serve.structured_outputs import MaskedDrafts

MadeUpDrafts = Callable[[Request], Sequence[int]]


@dataclass
class DraftCounts:
    num_accepted: int = 0
    num_rejected: int = 0


class SteadyPace(DraftPace):
    """Drafts as much, whatever becomes of it."""

    def verified(self, num_drafts: int, num_accepted: int, num_output_tokens: int) -> None:
        pass


class MadeUpDrafter:
    """Drafts for one request what `drafts` says."""

    def __init__(self, drafts: MadeUpDrafts, request: Request) -> None:
        self._drafts = drafts
        self._request = request

    def take_in(self, token_ids: Sequence[int], most: int) -> int:
        return 0

    def draft(self, most: int) -> Sequence[int]:
        return self._drafts(self._request)[:most]


@contextmanager
def drafting(
    drafts: MadeUpDrafts, pace_class: type[DraftPace] = SteadyPace
) -> Iterator[DraftCounts]:
    """Engines that are made meanwhile verify these drafts."""
    counts = DraftCounts()

    class MadeUpDrafting(Drafting):
        def _begin(self, request: Request) -> DraftedRequest:
            drafter = MadeUpDrafter(drafts, request)
            return DraftedRequest(drafter, pace_class(8))

        def verified(
            self, progress: RequestProgress, masked: MaskedDrafts | None, totals: SchedulerTotals
        ) -> None:
            super().verified(progress, masked, totals)
            counts.num_accepted += progress.num_accepted_drafts
            counts.num_rejected += progress.num_rejected_drafts

    def make_drafter(*settings: Any) -> NgramDrafter:
        return NgramDrafter(1, 1)

    with (
        mock.patch.object(core, "Drafting", MadeUpDrafting),
        mock.patch.object(core, "make_drafter", make_drafter),
    ):
        yield counts


def some_drafts(answer: Sequence[int], vocab_size: int, rng: random.Random) -> list[int]:
    """None or a few drafts for an answer: right ones, wrong from one on, or some wrong in between.

    Some go on beyond the answer's end.
    """
    drafts = [*answer[: rng.randrange(8)], *rng.choices(range(vocab_size), k=rng.randrange(2))]
    if drafts and rng.random() < 0.7:
        drafts[rng.randrange(len(drafts))] = rng.randrange(vocab_size)
    return drafts
