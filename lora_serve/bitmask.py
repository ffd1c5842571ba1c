"""Which tokens of a vocabulary are allowed, as bits.

Token i is allowed where bit i % 8 of byte i // 8 is set. A mask may be shorter or longer than the
vocabulary: none is allowed behind its last byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def bitmask_of(token_ids: Sequence[int], size: int) -> bytes:
    """The mask, for `size` tokens, that allows these alone."""
    flags = np.zeros(size, np.bool_)
    flags[np.asarray(token_ids, np.int64)] = True
    return bitmask_of_flags(flags)


def bitmask_of_one(token_id: int) -> bytes:
    """The mask that allows one token alone."""
    return bytes(token_id // 8) + bytes((1 << token_id % 8,))


def bitmask_of_flags(flags: ArrayLike) -> bytes:
    """The mask of booleans, or of zeros and ones: one for each token."""
    return np.packbits(np.asarray(flags), bitorder="little").tobytes()


def flags_of(bitmask: bytes) -> NDArray[np.uint8]:
    """A one for each token that is allowed, and a zero for each other one, to the last byte's."""
    return np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")


def allows(bitmask: bytes, token_id: int) -> bool:
    place = token_id // 8
    return place < len(bitmask) and bool(bitmask[place] >> token_id % 8 & 1)


def allows_any(bitmask: bytes, but: Sequence[int] = ()) -> bool:
    """Whether a token is allowed that is none of `but`."""
    flags, others = flags_of(bitmask), np.asarray(but, np.int64)
    flags[others[others < len(flags)]] = 0
    return bool(flags.any())


def only_token(bitmask: bytes) -> int | None:
    """The token that is allowed, if it is the only one."""
    number = int.from_bytes(bitmask, "little")
    return number.bit_length() - 1 if number.bit_count() == 1 else None


def common_bitmask(bitmask: bytes, other: bytes | None) -> bytes:
    """The mask of what both allow; None allows all."""
    if other is None:
        return bitmask
    size = min(len(bitmask), len(other))
    both = np.frombuffer(bitmask, np.uint8, size) & np.frombuffer(other, np.uint8, size)
    return both.tobytes()


def with_token(bitmask: bytes, token_id: int) -> bytes:
    """The mask that allows one more token."""
    place = token_id // 8
    wider = bytearray(bitmask.ljust(place + 1, b"\0"))
    wider[place] |= 1 << token_id % 8
    return bytes(wider)
