"""One request's blocks of one group. `KVCacheManager` alone writes it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of a request's tokens in their order, as far as it has got any.

    block_ids: numbers side by side, so that a step takes a long request's as one copy of memory.
    num_unseen: of the first ones, which no token to be computed sees: they were freed, and what
        stands for them is no block of this request.
    """

    block_ids: array[int] = field(default_factory=lambda: array("i"))
    num_unseen: int = 0

    @property
    def seen_block_ids(self) -> array[int]:
        """The blocks that tokens yet to be computed see: the ones that the request refers to."""
        return self.block_ids[self.num_unseen :]
