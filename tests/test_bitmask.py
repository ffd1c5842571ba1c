"""Masks against sets of tokens."""

from __future__ import annotations

import random

import pytest

from lora_serve.bitmask import (
    allows,
    allows_any,
    bitmask_of,
    bitmask_of_flags,
    bitmask_of_one,
    common_bitmask,
    flags_of,
    only_token,
    with_token,
)

SIZES = (1, 7, 8, 9, 16, 61)


def tokens_of(bitmask: bytes) -> set[int]:
    return {token_id for token_id in range(8 * len(bitmask)) if allows(bitmask, token_id)}


def drawn_tokens(rng: random.Random, size: int) -> set[int]:
    return {token_id for token_id in range(size) if rng.random() < rng.choice((0.0, 0.2, 0.9))}


@pytest.mark.parametrize("size", SIZES)
def test_a_mask_allows_the_tokens_that_it_is_made_of(size: int) -> None:
    rng = random.Random(size)
    for _ in range(50):
        tokens = drawn_tokens(rng, size)
        bitmask = bitmask_of([*tokens], size)
        assert len(bitmask) == -(-size // 8)
        assert tokens_of(bitmask) == tokens
        assert bitmask_of_flags(flags_of(bitmask)) == bitmask
        assert only_token(bitmask) == (min(tokens) if len(tokens) == 1 else None)
        more = rng.randrange(2 * size)
        assert tokens_of(with_token(bitmask, more)) == tokens | {more}
        banned = [*drawn_tokens(rng, 2 * size)]
        assert allows_any(bitmask, banned) == bool(tokens - {*banned})


@pytest.mark.parametrize("size", SIZES)
def test_what_masks_of_unequal_length_allow_in_common_both_allow(size: int) -> None:
    rng = random.Random(size)
    for other_size in SIZES:
        these, those = drawn_tokens(rng, size), drawn_tokens(rng, other_size)
        bitmask = bitmask_of([*these], size)
        assert tokens_of(common_bitmask(bitmask, bitmask_of([*those], other_size))) == these & those
        assert common_bitmask(bitmask, None) is bitmask


def test_the_mask_of_one_token_is_no_longer_than_it_needs() -> None:
    for token_id in range(40):
        bitmask = bitmask_of_one(token_id)
        assert (tokens_of(bitmask), len(bitmask)) == ({token_id}, token_id // 8 + 1)
        assert not allows(bitmask, token_id + 8)
