"""The threads in which adapters are read and prepared. They hold no state of the loader."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

Work = Callable[[], None]

CLOSE_SECONDS = 10.0


class LoaderThreads(Protocol):
    """`AdapterThreads`, or a test's own. No work raises."""

    def start_read(self, work: Work) -> None:
        """Run in a thread of its own what may never end."""

    def prepare(self, work: Work) -> None:
        """Run in the one thread for work that computes, after what was given before."""

    def close(self) -> None:
        """End what ends by itself; reads that hang are left to die with the process."""


class AdapterThreads:
    """A thread for each read: one that hangs keeps nothing else. One thread that prepares.

    Preparing takes cores from the steps, so that no two adapters are prepared at a time.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._preparer = threading.Thread(target=self._run, name="adapter-prepare", daemon=True)
        self._preparer.start()

    def start_read(self, work: Work) -> None:
        threading.Thread(target=work, name="adapter-read", daemon=True).start()

    def prepare(self, work: Work) -> None:
        self._works.put(work)

    def close(self) -> None:
        self._works.put(None)
        self._preparer.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()
