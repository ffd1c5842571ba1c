"""Which of a layer's outputs, heads or tokens are a rank's own. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lora_serve.distributed.group import Group


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of several."""

    rank: int = 0
    world_size: int = 1

    def share(self, count: int) -> range:
        """Its own of `count` things in a row: those of all ranks follow each other."""
        return range(
            count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size
        )

    def all(self) -> list[RankPlace]:
        """The places of all ranks."""
        return [RankPlace(rank, self.world_size) for rank in range(self.world_size)]


class Division(Protocol):
    """How things in a row are divided among ranks.

    The shares of ranks are in the order of ranks, and together they are all.
    """

    @property
    def size(self) -> int:
        """How many there are."""

    def share(self, place: RankPlace) -> range:
        """A rank's own."""


@dataclass(frozen=True, slots=True)
class Evenly:
    """Shares that differ by one at most."""

    size: int

    def share(self, place: RankPlace) -> range:
        """Do what `Division` says."""
        return place.share(self.size)


@dataclass(frozen=True, slots=True)
class Replicated:
    """Shares of one at least: where there are more ranks, neighbours have the same one."""

    size: int

    def share(self, place: RankPlace) -> range:
        """Do what `Division` says."""
        own = place.share(self.size)
        return range(own.start, max(own.stop, own.start + 1))


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention's heads. As many query heads share each KV head; these stay beside it.

    KV heads are divided as evenly as they can be. Where there are more ranks, several keep the same
    one, and divide its query heads.
    """

    num_heads: int
    num_kv_heads: int

    def kv(self, place: RankPlace) -> range:
        return Replicated(self.num_kv_heads).share(place)

    def queries(self, place: RankPlace) -> range:
        """There must be one for each rank at least."""
        kv, each = self.kv(place), self.num_heads // self.num_kv_heads
        keepers = [other.rank for other in place.all() if self.kv(other) == kv]
        own = RankPlace(keepers.index(place.rank), len(keepers)).share(len(kv) * each)
        return range(kv.start * each + own.start, kv.start * each + own.stop)


@dataclass(frozen=True, slots=True)
class HeadChannels:
    """The channels of all query heads, or of all KV heads, head by head."""

    heads: Heads
    head_size: int
    are_kv: bool = False

    @property
    def size(self) -> int:
        """Do what `Division` says."""
        count = self.heads.num_kv_heads if self.are_kv else self.heads.num_heads
        return count * self.head_size

    def share(self, place: RankPlace) -> range:
        """Do what `Division` says."""
        own = self.heads.kv(place) if self.are_kv else self.heads.queries(place)
        return range(own.start * self.head_size, own.stop * self.head_size)


def given(division: Division, place: RankPlace) -> range:
    """What a rank gives where all are put together: of what several have, the first gives it."""
    own = division.share(place)
    if place.rank == 0:
        return own
    before = division.share(RankPlace(place.rank - 1, place.world_size))
    return range(max(own.start, before.stop), own.stop)


def place_of(group: Group) -> RankPlace:
    return RankPlace(group.rank, group.world_size)
