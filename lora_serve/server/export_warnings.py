"""What OpenTelemetry's exporter says of a collector that takes no spans, as a short line a minute.

It warns of each try, in lines of hundreds of characters, for as long as the collector is away.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PACKAGE = "opentelemetry"
PERIOD_SECONDS = 60.0
MAX_REASON_CHARS = 120
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([\w ]+)")


class ExportWarnings(logging.Handler):
    """Stands for the package's own lines, from construction to `close`."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._clock = clock
        self._told: float | None = None  # when
        self._num_untold = 0
        self._package = logging.getLogger(PACKAGE)
        self._package.addHandler(self)
        self._package.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        if self._told is not None and now - self._told < PERIOD_SECONDS:
            self._num_untold += 1
            return
        logger.warning(
            "no spans reach %s (--otlp-traces-endpoint)%s: %s",
            self._endpoint,
            f", {self._num_untold} warnings untold" if self._num_untold else "",
            _reason(record),
        )
        self._told, self._num_untold = now, 0

    def close(self) -> None:
        self._package.removeHandler(self)
        self._package.propagate = True
        super().close()


def _reason(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        text = f"{text} {record.exc_info[1]}"
    if found := _SYSTEM_ERROR.search(text):
        return found[1]
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}…"
