"""Bounds what clients can write to the log through uvicorn's warnings.

uvicorn warns of each request that is no HTTP and of each WebSocket that it is asked for, so a
client could fill a disk. Here a warning is told once, and then how often it came again, every few
seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator

logger = logging.getLogger(__name__)

UVICORN = "uvicorn.error"
PERIOD_SECONDS = 10.0


class RepeatedWarnings(logging.Filter):
    """Lets one warning of each text through until `tell` has counted the others."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()  # uvicorn's texts are constants, and few

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        self._counts[record.msg] += 1
        return self._counts[record.msg] == 1

    def tell(self) -> None:
        for text, count in self._counts.items():
            if count > 1:
                logger.warning("%s (%d times more in %g s)", text, count - 1, PERIOD_SECONDS)
        self._counts.clear()


@contextlib.asynccontextmanager
async def bounded_warnings() -> AsyncIterator[None]:
    """Uvicorn's warnings are counted meanwhile."""
    repeated = RepeatedWarnings()
    task = asyncio.create_task(_tell_now_and_then(repeated), name="repeated-warnings")
    logging.getLogger(UVICORN).addFilter(repeated)
    try:
        yield
    finally:
        logging.getLogger(UVICORN).removeFilter(repeated)
        task.cancel()
        repeated.tell()


async def _tell_now_and_then(repeated: RepeatedWarnings) -> None:
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        repeated.tell()
