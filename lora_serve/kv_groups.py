"""How much KV a request needs at once, where layers see a window. Arithmetic alone.

    blocks that n tokens in a row and all they see through a window w lie in, at most:
    ceil((w + n - 2) / block_size) + 1

for these are w - 1 + n positions, which may begin with the last one of a block.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV is needed equally long: they share one block table.

    window: the token at position p sees positions (p - window, p]; None: all up to p.
    """

    window: int | None = None

    def first_seen(self, num_tokens: int, block_size: int) -> int:
        """The first block that a token at position num_tokens, or at a later one, sees."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // block_size


@dataclass(frozen=True, slots=True)
class KVNeeds:
    """How many blocks one request needs.

    in_flight: the most of its tokens that the steps in flight may compute, all together.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    in_flight: int = 1

    def most_seen(self, group: KVGroup) -> int:
        """The most blocks of a windowed group that a request holds at once."""
        assert group.window is not None, "a group without a window holds all blocks"
        return -(-(group.window + self.in_flight - 2) // self.block_size) + 1

    def blocks_of_request(self, num_tokens: int) -> int:
        """The most that a request of so many tokens holds at once, of all groups."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(
            num_blocks if group.window is None else min(num_blocks, self.most_seen(group))
            for group in self.groups
        )

    def longest_request(self, num_blocks: int, max_model_len: int) -> int:
        """The most tokens, of max_model_len at most, that a pool of num_blocks holds of one."""
        lengths = range(1, max_model_len + 1)
        return bisect_right(lengths, num_blocks, key=self.blocks_of_request)


def tokens_in_flight(
    groups: tuple[KVGroup, ...],
    block_size: int,
    *,
    num_blocks: int,
    max_model_len: int,
    wanted: int,
    least: int,
) -> int:
    """How many tokens of one request steps may compute at once: `wanted`, or as many as fit.

    In a small pool that is less of a long prompt, but not less than `least`, so that the pool holds
    the longest request that it can hold at all.
    """

    def needs(in_flight: int) -> KVNeeds:
        return KVNeeds(groups, block_size, in_flight)

    longest = needs(least).longest_request(num_blocks, max_model_len)
    sizes = range(least, wanted + 1)
    num_fitting = bisect_right(
        sizes, num_blocks, key=lambda size: needs(size).blocks_of_request(longest)
    )
    return least + max(0, num_fitting - 1)
