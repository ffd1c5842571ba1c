"""Adds drafts to a scheduled step, and learns what became of them. Decides nothing of an answer.

Drafts get what is left when all else is scheduled: tokens of the budget, rows, and blocks that are
free beyond one for each running request. No request is preempted, and none waits, for a draft.
Tokens that a grammar forces come before guesses: they are certain to be drawn. What is guessed of
an answer that a grammar holds goes to the grammar first, and comes back as far as that permits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from lora_serve.bitmask import allows
from lora_serve.config import SpeculativeConfig
from lora_serve.config.speculative import TOKENS_TAKEN_IN
from lora_serve.identity import BASE_MODEL, AdapterRef, Everything
from lora_serve.kv.manager import KVCacheManager
from lora_serve.scheduler.chunk import scheduled_chunk
from lora_serve.scheduler.draft_offers import (
    Offer,
    masked_offer,
    most_drafts,
    nums_worth,
    pace_of,
)
from lora_serve.scheduler.drafted import DraftedRequest
from lora_serve.scheduler.in_flight import ScheduledPair
from lora_serve.scheduler.progress import RequestProgress
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.totals import SchedulerTotals
from lora_serve.speculation.base import Drafter, Origin
from lora_serve.speculation.draft_model import DraftModelDrafter, DraftModelRequest
from lora_serve.speculation.pace import DraftPace
from lora_serve.speculation.row_costs import RowCosts
from lora_serve.step import RequestStepOutput, ScheduledRequest
from lora_serve.structured_outputs import NO_GUESS, Guess, MaskedDrafts

CurrentVersion = Callable[[str], AdapterRef | None]

# Tokens of prompts that drafters take in between two steps, all together: 4 ms of them, about.
_MOST_TAKEN_IN = 1024


class Drafting:
    """Drafts of all requests. current: which version an adapter's name stands for.

    drafter: None where nothing is drafted but what grammars force. costs: of rows, for guesses that
    are worth their time; None takes all that there is room for.
    A request's drafter holds its tokens, so there are at most config.max_drafters of them. Requests
    that run beside them draft once one of those has ended.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: Drafter | None,
        kv: KVCacheManager,
        current: CurrentVersion,
        costs: RowCosts | None = None,
    ) -> None:
        self._most = config.speculative_num_speculative_tokens
        self._max_rows = config.max_draft_rows
        self._max_drafters = config.max_drafters
        self._drafter = drafter
        self._draft_model = drafter if isinstance(drafter, DraftModelDrafter) else None
        self._kv = kv
        self._current = current
        self._costs = costs
        self._num_drafters = 0
        self._num_to_take_in = 0  # in this step

    def add(self, scheduled: list[ScheduledPair], budget: int, num_running: int) -> None:
        """Put drafts behind the last tokens of scheduled chunks. budget: tokens that are left."""
        has_forced = any(request.masked_drafts is not None for request, _ in scheduled)
        if self._drafter is None and not has_forced:
            return
        num_sampling = sum(bool(chunk.asked.samples) for _, chunk in scheduled)
        num_rows = min(budget, self._max_rows - num_sampling)
        if has_forced:
            num_rows -= self._add_forced(scheduled, num_rows, num_running)
        if self._drafter is not None:
            self._drafter.work()
            self._num_to_take_in = _MOST_TAKEN_IN
            self._add_guesses(scheduled, num_rows, num_sampling, num_running)
        if self._draft_model is not None:
            self._ask_draft_model(self._draft_model, scheduled, num_sampling)

    def _add_forced(self, scheduled: list[ScheduledPair], num_rows: int, num_running: int) -> int:
        """Add what grammars force, in at most so many rows; returns how many."""
        num_left = num_rows
        for index, (request, chunk) in enumerate(scheduled):
            if num_left <= 0:
                break
            if (masked := request.masked_drafts) is None or not chunk.asked.samples:
                continue
            most = min(masked.num_forced, num_left, most_drafts(request))
            num_left -= self._put(scheduled, index, masked.token_ids[:most], num_running)
        return num_rows - num_left

    def _add_guesses(
        self, scheduled: list[ScheduledPair], num_rows: int, num_sampling: int, num_running: int
    ) -> None:
        """Add what drafters guess, in at most so many rows. num_sampling: requests that sample."""
        offers = []
        for index, (request, chunk) in enumerate(scheduled):
            num_wanted = 0
            if chunk.asked.samples:
                num_wanted = self._num_wanted(request, chunk, -(-num_rows // num_sampling))
                num_sampling -= 1  # what this one leaves of its share is for the others
                if not num_wanted:
                    continue  # its drafter takes in later what it has not yet
            if not _may_draft(request) or not self._has_drafter(request):
                continue
            offer = self._offer(request, chunk, num_wanted, num_rows)
            if offer is not None and offer.num_guessed:
                offers.append((index, offer))
                num_rows -= offer.num_guessed
        num_computed = sum(chunk.num_tokens for _, chunk in scheduled)
        num_tokens = sum(len(chunk.asked.samples) for _, chunk in scheduled)
        counts = nums_worth(
            self._costs,
            [offer for _, offer in offers],
            num_computed,
            num_tokens,
            is_drawn=_is_drawn(scheduled),
        )
        for (index, offer), count in zip(offers, counts, strict=True):
            self._put(scheduled, index, offer.first(count), num_running)

    def _offer(
        self, request: Request, chunk: ScheduledRequest, num_wanted: int, num_rows: int
    ) -> Offer | None:
        """So many guesses, or none; their rows and those that they let a grammar force are more."""
        is_constrained = request.is_constrained
        drafts = self._drafts(request, 0 if is_constrained else num_wanted)
        if not is_constrained:
            return Offer.of_guesses(request, drafts)
        return masked_offer(request, chunk.asked.num_drafts, num_wanted, num_rows)

    def guesses(self, requests: Sequence[Request], num_running: int) -> list[Guess]:
        """What may come next in answers that grammars hold, for those to say how far they permit.

        num_running: requests.
        """
        if self._drafter is None:
            return [NO_GUESS] * len(requests)
        num_rows = self._max_rows - num_running
        offers: dict[int, Offer] = {}
        for index, request in enumerate(requests):
            share = -(-num_rows // (len(requests) - index))
            most = min(share, most_drafts(request))
            if most <= 0 or not _may_draft(request) or not self._has_drafter(request):
                continue
            is_wanted = pace_of(request).num_wanted(request.num_output_tokens)
            if drafts := self._drafts(request, most if is_wanted else 0):
                offers[index] = Offer.of_guesses(request, drafts)
                num_rows -= len(drafts)
        is_drawn = not all(request.params.is_greedy for request in requests)
        counts = nums_worth(
            self._costs, [*offers.values()], num_running, num_running, is_drawn=is_drawn
        )
        found = [NO_GUESS] * len(requests)
        for (index, offer), count in zip(offers.items(), counts, strict=True):
            most = offer.pace.num_wanted(offer.request.num_output_tokens)
            found[index] = Guess(offer.drafts, most) if count else NO_GUESS
        return found

    def _drafts(self, request: Request, most: int) -> tuple[int, ...]:
        """What the request's drafter guesses, once it has taken in the tokens that it has not.

        As many as a step with guesses draws are taken in whatever others leave of the step.
        """
        assert request.drafted is not None, f"{request.request_id} has a drafter"
        drafter = request.drafted.drafter
        most_new = max(self._num_to_take_in, self._most + 1)
        self._num_to_take_in -= drafter.take_in(request.token_ids, most_new)
        return _drawable(request, tuple(drafter.draft(most))) if most else ()

    def _ask_draft_model(
        self, model: DraftModelDrafter, scheduled: list[ScheduledPair], num_sampling: int
    ) -> None:
        """Have the draft model guess what follows the tokens that the step draws.

        Where it has not come so far with a request it catches up, in all by as many tokens as the
        step computes or by a few hundred. num_sampling: requests that sample.
        """
        num_rows, num_left = self._max_rows - num_sampling, num_sampling
        catching_up, sampling = [], []
        for index, (request, chunk) in enumerate(scheduled):
            if not chunk.asked.samples:
                catching_up.append((index, 0))
                continue
            num_wanted = self._num_next(request, -(-num_rows // num_left))
            num_left -= 1
            if num_wanted > 0 and _may_draft(request) and self._has_drafter(request):
                num_rows -= num_wanted
                sampling.append((index, num_wanted))
        offers = [Offer.of_guesses(scheduled[i][0], (0,) * count) for i, count in sampling]
        counts = nums_worth(
            self._costs,
            offers,
            num_sampling,
            num_sampling,
            is_drawn=_is_drawn(scheduled),
            are_made=False,
        )
        asked = [
            (index, count) for (index, _), count in zip(sampling, counts, strict=True) if count
        ]
        most_tokens = max(TOKENS_TAKEN_IN, sum(chunk.num_tokens for _, chunk in scheduled))
        for index, count in asked + catching_up:
            request, chunk = scheduled[index]
            if not (_may_draft(request) and self._has_drafter(request)):
                continue
            most_drawn = request.num_pending_tokens + len(chunk.asked.samples)
            part = model.plan(
                _draft_model_request(request), request.token_ids, most_drawn, count, most_tokens
            )
            if part is not None:
                most_tokens -= len(part.token_ids)
                scheduled[index] = request, replace(chunk, draft_chunk=part)

    def _num_next(self, request: Request, num_rows: int) -> int:
        """How many drafts a request may have in the step behind the one that is scheduled."""
        least_drawn = request.num_pending_tokens + 1
        num_wanted = self._most
        if request.drafted is not None:
            num_wanted = request.drafted.pace.num_wanted(request.num_output_tokens + least_drawn)
        return min(num_wanted, num_rows, most_drafts(request) - least_drawn)

    def reported(
        self,
        chunk: ScheduledRequest,
        result: RequestStepOutput,
        progress: RequestProgress,
        masked: MaskedDrafts | None,
        totals: SchedulerTotals,
    ) -> None:
        """Take in what a step came to for a request: of its drafts, and of those it was to make.

        masked: those of its grammar that it had before, if it has one.
        """
        request = progress.request
        if chunk.draft_chunk is not None and chunk.num_next_drafts:
            request.awaits_drafts = False
        if len(chunk.asked.samples) > 1:
            self.verified(progress, masked, totals)
        if result.next_drafts:
            self.guessed(request, result.next_drafts)

    def guessed(self, request: Request, drafts: tuple[int, ...]) -> None:
        """Take in what the draft model guesses to follow a request's tokens."""
        if request.drafted is not None:
            _draft_model_request(request).guessed(request.token_ids, drafts)

    def stopped(self, request: Request) -> None:
        """Drop the KV that the draft model has of a request that runs no longer."""
        if self._draft_model is not None and request.drafted is not None:
            self._draft_model.release(_draft_model_request(request))

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
        if self._draft_model is not None:
            self._draft_model.check_invariants()

    def verified(
        self, progress: RequestProgress, masked: MaskedDrafts | None, totals: SchedulerTotals
    ) -> None:
        """Take in what became of a request's drafts. masked: its grammar's, if it has one."""
        request, num_accepted = progress.request, progress.num_accepted_drafts
        num_drafts = num_accepted + progress.num_rejected_drafts
        totals.count_drafts(num_drafts, num_accepted)
        if masked is not None:
            num_drafts, num_accepted = map(masked.num_guesses, (num_drafts, num_accepted))
        if num_drafts and request.drafted is not None:
            request.drafted.pace.verified(num_drafts, num_accepted, request.num_output_tokens)

    def ended(self, request: Request) -> None:
        """Learn from the answer of a request that has ended, if its version is still asked for."""
        if request.drafted is not None:
            request.drafted = None
            self._num_drafters -= 1
        adapter, drafter = request.namespace.adapter, self._drafter
        if drafter is None:
            return
        if adapter is BASE_MODEL or self._current(adapter.name) == adapter:
            drafter.learn(_origin(request), request.token_ids[request.num_prompt_tokens :])

    def reset(self, lora_name: str | Everything) -> None:
        """Forget EVERYTHING of past answers, or those of a name."""
        if self._drafter is not None:
            self._drafter.forget(lora_name)

    def name_stands_for(self, name: str, ref: AdapterRef | None) -> None:
        """Forget the answers of versions that a name no longer stands for."""
        if self._drafter is not None:
            self._drafter.forget(name, ref)

    def _has_drafter(self, request: Request) -> bool:
        """Whether the request has a drafter, or could be given one."""
        if request.drafted is None and self._num_drafters < self._max_drafters:
            self._num_drafters += 1
            request.drafted = self._begin(request)
        return request.drafted is not None

    def _begin(self, request: Request) -> DraftedRequest:
        assert self._drafter is not None, "nothing is guessed here"
        drafter = self._drafter.begin(_origin(request), request.num_prompt_tokens)
        return DraftedRequest(drafter, DraftPace(self._most))

    def _num_wanted(self, request: Request, chunk: ScheduledRequest, num_rows: int) -> int:
        """How many drafts the chunk may have, blocks apart."""
        if chunk.token_from is not None or num_rows <= 0:
            return 0
        num_wanted = self._most
        if request.drafted is not None:
            num_wanted = request.drafted.pace.num_wanted(request.num_output_tokens)
        return max(0, min(num_wanted, num_rows, most_drafts(request)))

    def _put(
        self, scheduled: list[ScheduledPair], index: int, drafts: tuple[int, ...], num_running: int
    ) -> int:
        """Put drafts behind a chunk, as far as there are blocks; returns how many they are."""
        request, chunk = scheduled[index]
        if drafts and (drafts := self._with_room(request, chunk, drafts, num_running)):
            num_known = chunk.num_tokens - chunk.asked.num_drafts
            scheduled[index] = request, scheduled_chunk(request, num_known, drafts)
        return len(drafts)

    def _with_room(
        self,
        request: Request,
        chunk: ScheduledRequest,
        drafts: tuple[int, ...],
        num_running: int,
    ) -> tuple[int, ...]:
        """The first of the drafts, as many as there are blocks for."""
        start = chunk.end - chunk.asked.num_drafts
        if self._kv.has_windows:
            drafts = drafts[: max(0, self._kv.most_tokens(request) - start)]
        num_spared = num_running * len(request.block_tables)
        if drafts and not self._kv.extend(request, start + len(drafts), num_spared):
            drafts = drafts[: max(0, self._kv.capacity(request) - start)]
        return drafts


def _is_drawn(scheduled: Sequence[ScheduledPair]) -> bool:
    """Whether any row of the step is drawn, and not the largest logit's."""
    return any(chunk.asked.samples and not request.params.is_greedy for request, chunk in scheduled)


def _may_draft(request: Request) -> bool:
    """Whether guesses can be verified.

    Where reasoning may have to end, each row would have to know. What prompt embeddings stand for
    is no text to find a token in.
    """
    if request.thinking is not None and not request.thinking.is_over:
        return False
    return request.max_tokens > 1 and request.prompt_embeds is None


def _drawable(request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts, up to one that the client forbids, or that ends reasoning before a grammar."""
    end, allowed = _end_before_grammar(request), request.allowed
    for count, token_id in enumerate(drafts):
        if token_id == end or not (allowed is None or allows(allowed, token_id)):
            return drafts[:count]
    return drafts


def _end_before_grammar(request: Request) -> int | None:
    """The token behind which a grammar holds what is free yet; None where none does."""
    reasoning = request.params.reasoning
    is_free = reasoning is not None and request.has_grammar and not request.is_constrained
    return reasoning.end if is_free and reasoning is not None else None


def _draft_model_request(request: Request) -> DraftModelRequest:
    drafter = None if request.drafted is None else request.drafted.drafter
    assert isinstance(drafter, DraftModelRequest), f"{request.request_id} has no draft model"
    return drafter


def _origin(request: Request) -> Origin:
    return Origin(request.namespace, request.tenant)
