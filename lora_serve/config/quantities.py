"""Counts, bytes and times as people write them: 16K, 8GiB, 30m.

A letter alone is read as vLLM reads it: k is 1000 and K is 1024.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Literal

Quantity = Literal["count", "bytes"]

_NUMBER = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) ?([a-zA-Z]*)")
_LETTERS = "kmgt"
_POWERS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{letter.upper(): 1024**power for power, letter in enumerate(_LETTERS, 1)},
}
_SIZES = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate(_LETTERS, 1)},
}
_DURATIONS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def count_of(text: str) -> int:
    """A number of tokens, such as 16384 or 16K. Raises ValueError with the reason."""
    number = _whole(text, _POWERS)
    if number is None:
        raise ValueError(f"{text!r} is no whole number, such as 16384, 16K (16384) or 16k (16000)")
    return number


def bytes_of(text: str) -> int:
    """A number of bytes, such as 4096, 512MiB or 1.5GB. Raises ValueError with the reason."""
    number = _whole(text, _POWERS)
    if number is None:
        number = _whole(text.lower(), _SIZES)
    if number is None:
        raise ValueError(
            f"{text!r} is no number of bytes, such as 4096, 512MiB, 8GiB (1024 MiB each) or 8GB "
            "(1000 MB each)"
        )
    return number


def seconds_of(text: str) -> float:
    """A time, such as 90, 30m, 2h or 7d. Raises ValueError with the reason."""
    number = _number(text, _DURATIONS)
    if number is None or number < 0:
        raise ValueError(f"{text!r} is no time, such as 90 (seconds), 30m, 2h or 7d")
    return float(number)


READERS: Mapping[Quantity, Callable[[str], int]] = {"count": count_of, "bytes": bytes_of}


def shown_size(num_bytes: int) -> str:
    """A number of bytes as a flag takes it: 16GiB, or the number itself where no unit divides it.

    >>> shown_size(2**24), shown_size(1000)
    ('16MiB', '1000')
    """
    for power, letter in reversed([*enumerate("KMGT", 1)]):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{letter}iB"
    return str(num_bytes)


def _whole(text: str, units: Mapping[str, int]) -> int | None:
    number = _number(text, units)
    return None if number is None or number != int(number) else int(number)


def _number(text: str, units: Mapping[str, int]) -> Decimal | None:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in units:
        return None
    return Decimal(match[1]) * units[match[2]]
