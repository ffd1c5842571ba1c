"""Clocks that ring late because this process stood still: it was stopped, or its machine was.

What clients sent meanwhile lies unread, and the event loop may run what a clock rings for before it
looks for that. Knows nothing of what the clocks are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONGEST_SECONDS = 10.0  # of a standstill, that are given back


def once_more(clock: asyncio.TimerHandle, then: Callable[[], None]) -> asyncio.TimerHandle:
    """Call `then` in as long as the clock rang late, when all that lies unread has been read.

    Returns:
        The clock that rings then, to be cancelled by what comes.
    """
    loop = asyncio.get_running_loop()
    return loop.call_later(min(loop.time() - clock.when(), LONGEST_SECONDS), then)
