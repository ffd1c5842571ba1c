"""Which waiting requests the tiers are asked for, and what came of it. Does no I/O, reads no clock.

A fetch asks for a run of one chain. Requests that miss the same next block share one fetch and its
bytes, which stay in hand until the last of them has been admitted or is gone. A request asks for
no block twice between two admissions, so its waiting ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lora_serve.identity import EVERYTHING, BlockHash, Everything
from lora_serve.kv_tiers.base import Buffer, Cause, FetchResult, TierNamespace

Who = TypeVar("Who", bound=Hashable)


@dataclass(slots=True, eq=False)
class Fetch(Generic[Who]):
    """One run of a chain: hashes[i] is that of block first_block + i.

    give_up_time: when waiting ends whatever the store does. num_bytes: of the memory for fetched
    blocks, what it takes or may come to take. members: the requests that still want it.
    """

    ticket: int
    namespace: TierNamespace
    first_block: int
    hashes: tuple[BlockHash, ...]
    give_up_time: float
    num_bytes: int
    members: dict[Who, None] = field(default_factory=dict)
    blocks: tuple[Buffer, ...] = ()
    num_blocks_by_tier: Mapping[str, int] = field(default_factory=dict)
    failure: Cause | None = None  # what kept a tier from giving more, if anything did

    def run_for(self, chain: Sequence[BlockHash], first_block: int) -> tuple[Buffer, ...]:
        """Blocks in hand for a chain from first_block on; none if there would be a gap."""
        start = first_block - self.first_block
        if start < 0:
            return ()
        wanted = chain[first_block : self.first_block + len(self.blocks)]
        return self.blocks[start : start + _num_shared(self.hashes[start:], wanted)]

    def tiers_of(self, num_blocks: int) -> dict[str, int]:
        """Where num_blocks of the blocks in hand came from; in the order of the tiers."""
        taken: dict[str, int] = {}
        for tier, count in self.num_blocks_by_tier.items():
            taken[tier] = min(count, num_blocks - sum(taken.values()))
        return taken


def _num_shared(ours: Sequence[BlockHash], theirs: Sequence[BlockHash]) -> int:
    """How many blocks two chains begin with in common."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _failure(result: FetchResult) -> Cause | None:
    """What kept a tier that was asked from answering. To have no more is no failure."""
    failures = (c for c in result.causes.values() if c not in (Cause.ABSENT, Cause.BREAKER))
    return next(failures, None)


class Fetches(Generic[Who]):
    """All fetches that are in flight, or have ended and are still wanted.

    block_bytes: of each block. max_bytes: that all may take.
    """

    def __init__(self, block_bytes: int, max_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._num_tickets = 0
        self._in_flight: dict[int, Fetch[Who]] = {}  # oldest first
        self._by_first_hash: dict[BlockHash, Fetch[Who]] = {}  # in flight
        self._by_member: dict[Who, Fetch[Who]] = {}
        self._asked: dict[Who, range] = {}
        self.num_bytes = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(fetch.members) for fetch in self._in_flight.values())

    @property
    def next_give_up_time(self) -> float | None:
        """When the oldest fetch in flight is given up; None if there is none."""
        for fetch in self._in_flight.values():
            return fetch.give_up_time
        return None

    def has_asked(self, who: Who, block: int) -> bool:
        """Whether `who` has asked for this block of its chain since `forget`."""
        return block in self._asked.get(who, ())

    def join(self, who: Who, chain: Sequence[BlockHash], first_block: int) -> bool:
        """Wait for the fetch in flight that begins with the block `who` misses; False if none."""
        fetch = self._by_first_hash.get(chain[first_block])
        if fetch is None:
            return False
        self._enter(fetch, who, _num_shared(fetch.hashes, chain[first_block:]))
        return True

    def start(
        self,
        who: Who,
        namespace: TierNamespace,
        hashes: Sequence[BlockHash],
        first_block: int,
        give_up_time: float,
    ) -> Fetch[Who] | None:
        """Begin to fetch as many of `hashes` as there is memory for; None if there is none."""
        num_blocks = min(len(hashes), (self._max_bytes - self.num_bytes) // self._block_bytes)
        if num_blocks <= 0:
            return None
        self._num_tickets += 1
        fetch: Fetch[Who] = Fetch(
            self._num_tickets,
            namespace,
            first_block,
            tuple(hashes[:num_blocks]),
            give_up_time,
            num_blocks * self._block_bytes,
        )
        self.num_bytes += fetch.num_bytes
        self._in_flight[fetch.ticket] = fetch
        self._by_first_hash[fetch.hashes[0]] = fetch
        self._enter(fetch, who, num_blocks)
        return fetch

    def take_in(self, results: Iterable[FetchResult]) -> list[Fetch[Who]]:
        """Take in results; returns the fetches that ended."""
        ended = []
        for result in results:
            fetch = self._in_flight.get(result.ticket)
            if fetch is None:
                continue
            self._finish(fetch)
            fetch.blocks = result.blocks[: len(fetch.hashes)]
            fetch.num_blocks_by_tier = result.num_blocks_by_tier
            fetch.failure = _failure(result)
            self._set_bytes(fetch, len(fetch.blocks) * self._block_bytes)
            ended.append(fetch)
        return ended

    def give_up(self, now: float) -> list[Fetch[Who]]:
        """End the fetches that the store should have ended by now, as misses; returns them."""
        late = [fetch for fetch in self._in_flight.values() if fetch.give_up_time <= now]
        for fetch in late:
            self._finish(fetch)
            self._set_bytes(fetch, 0)
            fetch.failure = Cause.DEADLINE
        return late

    def in_hand(self, who: Who) -> Fetch[Who] | None:
        """The fetch that `who` waits for, or has waited for."""
        return self._by_member.get(who)

    def forget(self, who: Who) -> int | None:
        """Forget a request that was admitted or is gone.

        Returns the ticket to cancel, if no other request waits for that fetch.
        """
        self._asked.pop(who, None)
        return self._leave(who)

    def drop(self, lora_name: str | Everything) -> list[Fetch[Who]]:
        """Forget bytes, come or coming, of one adapter or of all; the fetches that were in flight.

        Their members stay asked, so that they do not ask at once for what is being dropped.
        """
        of_name = {
            fetch: None
            for fetch in self._by_member.values()
            if lora_name is EVERYTHING or fetch.namespace.lora_name == lora_name
        }
        in_flight = [fetch for fetch in of_name if fetch.ticket in self._in_flight]
        for fetch in of_name:
            if fetch.ticket in self._in_flight:
                self._finish(fetch)
            self._set_bytes(fetch, 0)
            fetch.blocks = ()
            for who in fetch.members:
                del self._by_member[who]
        return in_flight

    def _enter(self, fetch: Fetch[Who], who: Who, num_blocks: int) -> None:
        self._leave(who)
        fetch.members[who] = None
        self._by_member[who] = fetch
        new = range(fetch.first_block, fetch.first_block + num_blocks)
        old = self._asked.get(who, new)
        self._asked[who] = range(min(old.start, new.start), max(old.stop, new.stop))

    def _leave(self, who: Who) -> int | None:
        fetch = self._by_member.pop(who, None)
        if fetch is None:
            return None
        del fetch.members[who]
        if fetch.members:
            return None
        self._set_bytes(fetch, 0)
        fetch.blocks = ()
        if fetch.ticket not in self._in_flight:
            return None
        self._finish(fetch)
        return fetch.ticket

    def _finish(self, fetch: Fetch[Who]) -> None:
        del self._in_flight[fetch.ticket]
        if self._by_first_hash.get(fetch.hashes[0]) is fetch:
            del self._by_first_hash[fetch.hashes[0]]

    def _set_bytes(self, fetch: Fetch[Who], num_bytes: int) -> None:
        self.num_bytes += num_bytes - fetch.num_bytes
        fetch.num_bytes = num_bytes

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        members = {who: fetch for fetch in set(self._by_member.values()) for who in fetch.members}
        assert members == self._by_member, "fetches and their members disagree"
        assert all(f in self._by_member.values() for f in self._in_flight.values()), (
            "fetched for no request"
        )
        assert self.num_bytes == sum(f.num_bytes for f in set(self._by_member.values())), (
            "bytes in hand"
        )
        assert self.num_bytes <= self._max_bytes, "more fetched bytes than there is memory for"
        assert set(self._by_member) <= set(self._asked), (
            "a request waits for what it did not ask for"
        )
        assert set(self._by_first_hash.values()) <= set(self._in_flight.values()), (
            "a fetch that has ended can be joined"
        )
