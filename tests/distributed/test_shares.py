from __future__ import annotations

from itertools import chain

import pytest

from lora_serve.distributed.shares import Evenly, HeadChannels, Heads, RankPlace, Replicated, given


@pytest.mark.parametrize("count", [0, 1, 7, 64, 151_936])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_follow_each_other_and_are_all(count: int, world_size: int) -> None:
    shares = [Evenly(count).share(place) for place in RankPlace(0, world_size).all()]
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("heads", [Heads(8, 8), Heads(8, 4), Heads(14, 2), Heads(6, 1)], ids=str)
def test_any_number_of_ranks_divides_heads(heads: Heads) -> None:
    """Query heads stay beside the KV heads that they see, as many beside each."""
    together = heads.num_heads // heads.num_kv_heads
    for world_size in range(1, heads.num_heads + 1):
        places = RankPlace(0, world_size).all()
        queries = [list(heads.queries(place)) for place in places]
        assert list(chain(*queries)) == list(range(heads.num_heads))
        for place, own in zip(places, queries, strict=True):
            kv = list(heads.kv(place))
            assert [q // together for q in own] == sorted(kv * (len(own) // len(kv)))
        for division, size in (
            (HeadChannels(heads, 3), 3 * heads.num_heads),
            (HeadChannels(heads, 3, are_kv=True), 3 * heads.num_kv_heads),
            (Replicated(heads.num_kv_heads), heads.num_kv_heads),
        ):
            gathered = chain(*(given(division, place) for place in places))
            assert list(gathered) == list(range(size))
            assert division.size == size
