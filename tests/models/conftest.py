from __future__ import annotations

from tests.fakes.threads import one_thread

__all__ = ["one_thread"]
