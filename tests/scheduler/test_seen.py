from __future__ import annotations

import random
from collections import Counter

from lora_serve.scheduler.seen import TokenCounts
from lora_serve.step import SeenTokens


def told(seen: SeenTokens) -> dict[int, int]:
    assert len(set(seen.token_ids)) == len(seen.token_ids)
    return dict(zip(seen.token_ids, seen.num_drawn, strict=True))


def test_each_token_is_told_once_with_how_often_it_was_drawn() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(50) for _ in range(60)]
    counts, drawn = TokenCounts(prompt), Counter[int]()
    assert told(counts.seen()) == dict.fromkeys(prompt, 0)
    for _ in range(200):
        token_id = rng.randrange(80)
        ahead = counts.seen().and_drawn(token_id)
        counts.drew(token_id)
        drawn[token_id] += 1
        assert told(ahead) == told(counts.seen())
        assert told(counts.seen()) == {each: drawn[each] for each in (*prompt, *drawn)}


def test_what_was_told_stays_as_it_was() -> None:
    counts = TokenCounts([1, 2])
    before = counts.seen()
    before.and_drawn(2)
    before.and_drawn(4)
    counts.drew(2)
    counts.drew(3)
    assert told(before) == {1: 0, 2: 0}
    assert told(counts.seen()) == {1: 0, 2: 1, 3: 1}
