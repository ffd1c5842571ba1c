"""One drop on its way through the tiers: which have forgotten for good, and why others have not.

KV that is not trusted any more must not come back, also after a kill of this process. So a drop is
reported as done only when every tier has confirmed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

NOT_YET = "it has not answered yet"


class Forgetting:
    """Thread-safe. Tiers report from their threads; `notify` is called when all have reported."""

    def __init__(
        self, tiers: Iterable[str] = (), notify: Callable[[], None] = lambda: None
    ) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._obstacles = dict.fromkeys(tiers, NOT_YET)
        self._silent = set(self._obstacles)

    @property
    def is_settled(self) -> bool:
        """Whether every tier has confirmed, or failed at least once."""
        return not self._silent

    @property
    def obstacles(self) -> Mapping[str, str]:
        """Why each tier that has not confirmed has not; empty when it is done."""
        with self._lock:
            return dict(self._obstacles)

    def confirm(self, tier: str) -> None:
        """Note that this tier has forgotten, for good."""
        with self._lock:
            del self._obstacles[tier]
        self._spoke(tier)

    def failed(self, tier: str, why: str) -> None:
        """Note that this tier cannot forget now, and will be asked again."""
        with self._lock:
            self._obstacles[tier] = why
        self._spoke(tier)

    def _spoke(self, tier: str) -> None:
        with self._lock:
            was_settled = self.is_settled
            self._silent.discard(tier)
            is_news = self.is_settled and not was_settled
        if is_news:
            self._notify()
