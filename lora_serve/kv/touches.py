"""Says when the tiers are to hear that a prefix is in use, which they cannot see for themselves.

A prefix that lies in the device cache is not asked of the tiers: there it grows old, and may be
evicted before the device forgets it. To tell them once in a while is cheap, and enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from lora_serve.identity import BlockHash

TOUCH_SECONDS = 30.0
MAX_REMEMBERED = 4096


class RecentTouches:
    """Remembers prefixes by the last block of each, which stands for all before it."""

    def __init__(
        self, clock: Callable[[], float], seconds: float = TOUCH_SECONDS, most: int = MAX_REMEMBERED
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._most = most
        self._told: OrderedDict[BlockHash, float] = OrderedDict()  # when; the oldest first

    def is_due(self, last: BlockHash) -> bool:
        """Whether the tiers shall be told of this prefix now; then it is not due for a while."""
        now = self._clock()
        if now - self._told.get(last, -self._seconds) < self._seconds:
            return False
        self._told[last] = now
        self._told.move_to_end(last)
        if len(self._told) > self._most:
            self._told.popitem(last=False)
        return True
