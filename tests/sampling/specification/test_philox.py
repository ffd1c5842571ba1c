from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.sampling.specification.philox import (
    Words2,
    Words4,
    many_random_bits,
    philox4x32,
    random_bits,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_are_the_known_answers_of_random123(
    counter: Words4[int], key: Words2[int], words: Words4[int]
) -> None:
    assert philox4x32(counter, key) == words


@given(seed=INT64, position=st.integers(0, 2**40))
def test_a_draw_has_53_bits(seed: int, position: int) -> None:
    assert 0 <= random_bits(seed, position) < 2**53


@pytest.mark.parametrize("count", [0, 100])
@given(seed=INT64, position=st.integers(0, 2**40))
def test_many_draws_are_those_of_each_alone(count: int, seed: int, position: int) -> None:
    seeds = [seed, -seed - 1, seed << 40, *range(count)]
    positions = [position, 0, 2**32 - 1, *range(2**32, 2**32 + count)]
    alone = [random_bits(*each) for each in zip(seeds, positions, strict=True)]
    assert many_random_bits(seeds, positions).tolist() == alone


@given(seed=INT64, position=st.integers(0, 2**40))
def test_neighbouring_seeds_and_positions_draw_differently(seed: int, position: int) -> None:
    draws = {
        random_bits(seed, position),
        random_bits(seed, position + 1),
        random_bits(seed + 1, position),
    }
    assert len(draws) == 3


def test_the_first_and_the_last_seed_differ_from_zero() -> None:
    assert len({random_bits(seed, 0) for seed in (-(2**63), -1, 0, 2**63 - 1)}) == 4


def test_draws_are_even_over_positions_and_over_seeds() -> None:
    for draws in (
        [random_bits(7, position) for position in range(8000)],
        [random_bits(seed, 7) for seed in range(8000)],
    ):
        counts = [0] * 16
        for draw in draws:
            counts[draw >> 49] += 1
        chi_square = sum((count - 500) ** 2 / 500 for count in counts)
        assert chi_square < 37.7  # 15 degrees of freedom, p = 0.001


def test_another_process_draws_the_same() -> None:
    module = "lora_serve.sampling.specification.philox"
    code = f"from {module} import random_bits; print(random_bits(-5, 123456))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(answer.stdout) == random_bits(-5, 123456)
