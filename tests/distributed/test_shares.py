from __future__ import annotations

import pytest

from lora_serve.distributed.shares import RankPlace


@pytest.mark.parametrize("count", [0, 1, 7, 64, 151_936])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_follow_each_other_and_are_all(count: int, world_size: int) -> None:
    shares = [RankPlace(rank, world_size).share(count) for rank in range(world_size)]
    assert [i for share in shares for i in share] == list(range(count))
    assert RankPlace(0, world_size).widths(count) == list(map(len, shares))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_what_cannot_be_divided_unevenly_is_not() -> None:
    assert RankPlace(1, 2).even_share(6) == 3
    with pytest.raises(AssertionError, match="7 among 2 ranks"):
        RankPlace(0, 2).even_share(7)
