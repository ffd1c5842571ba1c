"""Which of a layer's outputs, heads or tokens are a rank's own. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

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

    def widths(self, count: int) -> list[int]:
        """How many each rank has."""
        return [len(RankPlace(r, self.world_size).share(count)) for r in range(self.world_size)]

    def even_share(self, count: int) -> int:
        """How many each has of what cannot be divided unevenly."""
        assert count % self.world_size == 0, f"{count} among {self.world_size} ranks"
        return count // self.world_size


def place_of(group: Group) -> RankPlace:
    return RankPlace(group.rank, group.world_size)
