"""Whose requests hold how much of a room that all share, and which share's turn is next.

A share is an API key's, or that of all callers without one. Those that wait stand in a list by what
they hold, so a turn costs no walk over the others. Knows neither limits nor the event loop's tasks.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Place = tuple[int, float, str]  # of a share that waits: what it holds, its oldest's start, its name


@dataclass(eq=False, slots=True)
class Holding:
    """What one request holds of the room: bytes of a body, or characters of a text.

    waits_since: for room; None while it does not. waited_seconds: for room, in earlier waits.
    """

    share: Share
    amount: int = 0
    started: float = field(default_factory=time.monotonic)
    waits_since: float | None = None
    waited_seconds: float = 0.0

    def own_seconds(self, now: float) -> float:
        """How long it has been there without waiting for room."""
        waits = 0.0 if self.waits_since is None else now - self.waits_since
        return now - self.started - self.waited_seconds - waits


@dataclass(eq=False, slots=True)
class Wish:
    """What a request needs next, for which there is no room yet."""

    holding: Holding
    amount: int
    turn: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class Share:
    """num_holdings: of requests that are worked on now. wishes: of the oldest ones first.

    place: while it waits.
    """

    name: str
    amount: int = 0
    num_holdings: int = 0
    wishes: list[Wish] = field(default_factory=list)
    place: Place | None = None


AnyHolding = TypeVar("AnyHolding", bound=Holding)


class Shares(Generic[AnyHolding]):
    """The shares that hold something, or wait to."""

    def __init__(self, new_holding: Callable[[Share], AnyHolding]) -> None:
        self._new_holding = new_holding
        self._shares: dict[str, Share] = {}
        self._waiting: list[Place] = []  # in order
        self.amount = 0  # held by all

    def open(self, name: str) -> AnyHolding:
        """A new holding, of nothing yet, of the share of this name."""
        share = self._shares.setdefault(name, Share(name))
        share.num_holdings += 1
        return self._new_holding(share)

    def close(self, holding: AnyHolding) -> None:
        self.charge(holding, -holding.amount)
        holding.share.num_holdings -= 1
        if not holding.share.num_holdings:
            del self._shares[holding.share.name]

    def charge(self, holding: Holding, amount: int) -> None:
        holding.amount += amount
        holding.share.amount += amount
        self.amount += amount
        self._move(holding.share)

    @property
    def num_shares(self) -> int:
        return len(self._shares)

    @property
    def next_wish(self) -> Wish | None:
        """The oldest request's, of the share that holds least of those that wait."""
        return self._shares[self._waiting[0][-1]].wishes[0] if self._waiting else None

    def is_first(self, holding: Holding) -> bool:
        """Whether a wish of this request would be the next."""
        place = (holding.share.amount, holding.started, holding.share.name)
        return not self._waiting or place < self._waiting[0]

    def wait(self, wish: Wish) -> None:
        wish.holding.waits_since = time.monotonic()
        insort(wish.holding.share.wishes, wish, key=lambda each: each.holding.started)
        self._move(wish.holding.share)

    def stop_waiting(self, wish: Wish) -> bool:
        """Whether it was still waiting."""
        share = wish.holding.share
        if wish not in share.wishes:
            return False
        share.wishes.remove(wish)
        self._move(share)
        holding = wish.holding
        assert holding.waits_since is not None, "it has waited"
        holding.waited_seconds += time.monotonic() - holding.waits_since
        holding.waits_since = None
        return True

    def _move(self, share: Share) -> None:
        """Put a share where it belongs among those that wait."""
        if share.place is not None:
            del self._waiting[bisect_left(self._waiting, share.place)]
            share.place = None
        if share.wishes:
            share.place = (share.amount, share.wishes[0].holding.started, share.name)
            insort(self._waiting, share.place)
