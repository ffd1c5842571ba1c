"""The smallest number of replicas that keeps a promise. Knows nothing of what runs them."""

from __future__ import annotations

from collections.abc import Callable

from lora_serve.errors import ConfigError


def smallest(is_enough: Callable[[int], bool], most: int, least: int = 1) -> int:
    """The smallest number from `least` to `most` for which is_enough holds, asked O(log n) times.

    More is taken to be never worse than less.

    Raises:
        ConfigError: `most` is not enough.
    """
    low, high = least, least  # all below low are too few
    while not is_enough(high):
        low = high + 1
        if high >= most:
            raise ConfigError(
                f"{most} replicas are not enough; a limit may be below what a lone request takes. "
                "Loosen --goodput or --attainment, or raise --max-replicas"
            )
        high = min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return high
