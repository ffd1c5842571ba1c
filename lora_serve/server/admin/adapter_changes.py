"""The last changes of adapters that callers asked for over HTTP, for those who may make them.

A roll-back loads what stood under the name before, so each change keeps where that lies.
"""

from __future__ import annotations

from collections import deque

from lora_serve.server.admin.answers import AdapterChange

MAX_CHANGES = 256


class AdapterChanges:
    """The newest MAX_CHANGES; older ones are forgotten, and so are all when the server ends."""

    def __init__(self) -> None:
        self._changes: deque[AdapterChange] = deque(maxlen=MAX_CHANGES)

    def add(self, change: AdapterChange) -> None:
        self._changes.appendleft(change)

    def newest_first(self) -> list[AdapterChange]:
        return list(self._changes)
