"""What requests offer to a step that may be drawn next, and how much of it is worth its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.scheduler.request import Request
from lora_serve.speculation.pace import DraftPace
from lora_serve.speculation.row_costs import RowCosts


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafts for one request, the last of which are not certain.

    nums_guesses: how many guesses must be right for each of these, itself among them.
    """

    request: Request
    drafts: tuple[int, ...]
    nums_guesses: Sequence[int]

    @classmethod
    def of_guesses(cls, request: Request, drafts: tuple[int, ...]) -> Offer:
        return cls(request, drafts, range(1, len(drafts) + 1))

    @property
    def num_guessed(self) -> int:
        """How many rows they take beside those of drafts that are certain."""
        return len(self.nums_guesses)

    @property
    def pace(self) -> DraftPace:
        return pace_of(self.request)

    @property
    def gains(self) -> list[float]:
        """How likely each of the rows that are not certain gives a token, the first one first."""
        acceptance = self.pace.acceptance
        return [acceptance**count for count in self.nums_guesses]

    def first(self, num_guessed: int) -> tuple[int, ...]:
        """The drafts that are certain, and so many of the others; none without these."""
        num_certain = len(self.drafts) - self.num_guessed
        return self.drafts[: num_certain + num_guessed] if num_guessed else ()


def pace_of(request: Request) -> DraftPace:
    assert request.drafted is not None, f"{request.request_id} has no drafter"
    return request.drafted.pace


def most_drafts(request: Request) -> int:
    """How many drafts may stand before the last token of the answer."""
    return request.max_tokens - request.num_output_tokens - 1


def masked_offer(request: Request, num_put: int, most_guesses: int, most_rows: int) -> Offer | None:
    """What a grammar permits of a guess, behind the forced tokens that the step has already.

    num_put: how many these are.
    """
    masked = request.masked_drafts
    if masked is None or num_put < masked.num_forced:
        return None
    drafts = masked.token_ids[: min(num_put + most_rows, most_drafts(request))]
    nums_guesses = [masked.num_guesses(count) for count in range(num_put + 1, len(drafts) + 1)]
    within = [count for count in nums_guesses if count <= most_guesses]
    return Offer(request, drafts[: num_put + len(within)], within)


def nums_worth(
    costs: RowCosts | None,
    offers: Sequence[Offer],
    num_rows: int,
    num_tokens: int,
    *,
    is_drawn: bool,
    are_made: bool = True,
) -> list[int]:
    """How many of each offer's rows that are not certain are worth their time, the first ones.

    Args:
        costs: of rows; None takes all that there are.
        offers: of different requests.
        num_rows, num_tokens: that the step computes, and draws, without them.
        is_drawn: any row of the step.
        are_made: else the draft model has to guess them yet.
    """
    if costs is None or not offers:
        return [offer.num_guessed for offer in offers]
    rows = sorted((-gain, place) for place, offer in enumerate(offers) for gain in offer.gains)
    num_worth = costs.num_worth(
        num_rows,
        num_tokens,
        [-gain for gain, _ in rows],
        0.0 if are_made else costs.draft_seconds(len(offers)),
        is_drawn=is_drawn,
    )
    counts = Counter(place for _, place in rows[:num_worth])
    return [
        counts[place] or int(offer.pace.is_due(offer.request.num_output_tokens))
        for place, offer in enumerate(offers)
    ]
