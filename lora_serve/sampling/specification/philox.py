"""Random numbers that depend on (seed, position) alone: Philox4x32-10, a counter-based generator.

It has no state, so a preempted, restarted or differently batched request draws the same again.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

RANDOM_BITS = 53  # as many as a double holds

Word = TypeVar("Word", int, npt.NDArray[Any])  # of many draws at once: uint64, one for each
Words4 = tuple[Word, Word, Word, Word]
Words2 = tuple[Word, Word]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as the paper has them
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# One takes 4 us alone and 75 in an array, 256 take 1,000 one by one and 100 in an array (Zen 5).
_FEWEST_IN_ARRAYS = 20


def philox4x32(counter: Words4[Word], key: Words2[Word]) -> Words4[Word]:
    """Four random 32-bit words for a counter under a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(seed: Word, position: Word) -> Word:
    """A number in [0, 2**RANDOM_BITS), each as likely, the same in every process.

    Args:
        seed: any integer; its low 64 bits count, so a negative one is a seed like any other.
        position: absolute position of the token that is drawn.
    """
    nothing = position & 0
    words = philox4x32(
        (position & _MASK, (position >> 32) & _MASK, nothing, nothing),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    return (words[1] << 32 | words[0]) >> (64 - RANDOM_BITS)


def many_random_bits(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int64]:
    """random_bits of each seed and its position."""
    if len(seeds) < _FEWEST_IN_ARRAYS:
        return np.array(list(map(random_bits, seeds, positions)), np.int64)
    words = np.array([seed & _MASK64 for seed in seeds], np.uint64)
    return random_bits(words, np.array(positions, np.uint64)).astype(np.int64)


def uniform(seed: int, position: int) -> float:
    """The random number as a multiple of 2**-53 in [0, 1)."""
    return random_bits(seed, position) * 2.0**-RANDOM_BITS
