from __future__ import annotations

import random

import pytest

from lora_serve.identity import embeds_digest
from lora_serve.prompts import (
    EmbedsPrompt,
    MixedPrompt,
    Prompt,
    TokensPrompt,
    embeds_digests,
    last_occurrence,
    rows_between,
)

A, B, C = (bytes([letter]) * 4 for letter in b"abc")
MIXED = MixedPrompt.of([(5, 6), EmbedsPrompt(2, A + B), (7,), EmbedsPrompt(1, C)])


def test_parts_are_joined_in_their_order() -> None:
    assert MIXED.token_ids == (5, 6, 0, 0, 7, 0)
    assert MIXED.runs == ((2, 2, 0), (5, 1, 2))
    assert MIXED.data == A + B + C


def test_rows_that_follow_each_other_are_one_run_however_they_were_sent() -> None:
    apart = MixedPrompt.of([(5,), EmbedsPrompt(1, A), (), EmbedsPrompt(2, B + C)])
    assert apart == MixedPrompt.of([(5,), EmbedsPrompt(3, A + B + C)])


@pytest.mark.parametrize(
    ("prompt", "token_ids", "place"),
    [
        (TokensPrompt((1, 2, 3, 1, 2)), (1, 2), 3),
        (TokensPrompt((1, 2, 3, 1, 2)), (2, 3), 1),
        (TokensPrompt((1, 2, 1)), (1, 2, 1, 2), None),
        (TokensPrompt((256, 1)), (1,), 1),  # its bytes stand across both, too
        (TokensPrompt((1 << 16, 1 << 16, 2)), (1,), None),
        (TokensPrompt((7, 7, 7)), (7, 7), 1),
        (MIXED, (0,), None),  # rows are no tokens
        (MIXED, (7,), 4),
        (EmbedsPrompt(2, A + B), (0,), None),
    ],
)
def test_tokens_are_looked_for_from_the_end(
    prompt: Prompt, token_ids: tuple[int, ...], place: int | None
) -> None:
    assert last_occurrence(prompt, token_ids) == place


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_of_any_stretch_are_those_that_stand_there(seed: int) -> None:
    rng = random.Random(seed)
    parts: list[tuple[int, ...] | EmbedsPrompt] = [EmbedsPrompt(1, rng.randbytes(4))]
    for _ in range(rng.randrange(6)):
        count = rng.randrange(1, 5)
        parts.append(EmbedsPrompt(count, rng.randbytes(4 * count)))
        parts.append((1,) * rng.randrange(4))
    prompt = MixedPrompt.of(parts)
    rows = iter([prompt.data[at : at + 4] for at in range(0, len(prompt.data), 4)])
    by_place = {
        position + index: next(rows) for position, count, _ in prompt.runs for index in range(count)
    }
    for start in range(prompt.num_tokens):
        for end in range(start + 1, prompt.num_tokens + 2):
            found = rows_between(prompt, start, end)
            places = [start + place + i for place, count in found.runs for i in range(count)]
            assert places == [place for place in by_place if start <= place < end]
            assert found.data == b"".join(by_place[place] for place in places)


def test_rows_alone_are_found_as_before_whatever_form_they_have() -> None:
    rows = EmbedsPrompt(3, A + B + C)
    assert embeds_digests(rows, 2) == (embeds_digest(A + B), embeds_digest(C))
    assert embeds_digests(MixedPrompt.of([rows, (7,)]), 2) == embeds_digests(rows, 2)
    assert embeds_digests(TokensPrompt((1, 2)), 2) == ()


def test_the_same_rows_at_other_places_are_others() -> None:
    zero = (0,)
    prompts: list[Prompt] = [
        MixedPrompt.of([EmbedsPrompt(1, A), zero, zero]),
        MixedPrompt.of([zero, EmbedsPrompt(1, A), zero]),
        MixedPrompt.of([zero, zero, EmbedsPrompt(1, A)]),
        MixedPrompt.of([EmbedsPrompt(2, A + A), zero]),
        MixedPrompt.of([EmbedsPrompt(1, A), zero, EmbedsPrompt(1, A)]),
    ]
    assert len({embeds_digests(prompt, 4) for prompt in prompts}) == len(prompts)


def test_blocks_without_rows_have_no_digest() -> None:
    digests = embeds_digests(MIXED, 2)
    assert digests[0] == b""
    assert digests[1] == embeds_digest(A + B)
    assert len(digests) == 3
