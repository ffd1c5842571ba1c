"""One machine's cores in virtual time, and the workers that share them.

Each worker does one thing after the other, in the order in which they were asked for. Where those
that have something to do have more threads together than there are cores, all threads get equal
shares, as an operating system gives them. No core stands idle that a thread could use.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from lora_serve.simulate.events import Action, EventQueue


class Worker:
    """busy_seconds: how long it has had something to do so far."""

    def __init__(self, cores: Cores, num_threads: float) -> None:
        self._cores = cores
        self.num_threads = num_threads
        self.queue: deque[tuple[float, Action]] = deque()  # the first is what it does now
        self.left = 0.0  # seconds of the first, with as many cores as threads
        self.busy_seconds = 0.0

    def do(self, seconds: float, then: Action) -> None:
        """Have something done that takes so long with as many cores as threads; then call `then`.

        What takes no time and waits for nothing is done at once.
        """
        if not seconds and not self.queue:
            then()
            return
        self.queue.append((seconds, then))
        if len(self.queue) == 1:
            self._cores.begin(self)


class Cores:
    def __init__(self, num_cores: float, events: EventQueue) -> None:
        self._num_cores = num_cores
        self._events = events
        self._busy: list[Worker] = []
        self._pace = 1.0  # seconds of each busy worker's work that are done in a second
        self._since = 0.0  # when that pace began
        self._num_plans = 0

    def worker(self, num_threads: float = 1.0) -> Worker:
        return Worker(self, num_threads)

    def begin(self, worker: Worker) -> None:
        """Let a worker begin that was idle."""
        self._note_progress()
        worker.left = worker.queue[0][0]
        self._busy.append(worker)
        self._plan()

    def _note_progress(self) -> None:
        elapsed = self._events.now - self._since
        self._since = self._events.now
        for worker in self._busy:
            worker.left = max(0.0, worker.left - elapsed * self._pace)
            worker.busy_seconds += elapsed

    def _plan(self) -> None:
        """Plan the end of what ends first, unless another worker begins or ends before."""
        self._num_plans += 1
        if not self._busy:
            return
        num_threads = sum(worker.num_threads for worker in self._busy)
        self._pace = min(1.0, self._num_cores / num_threads)
        first = min(self._busy, key=lambda worker: worker.left)
        end = partial(self._end, first, self._num_plans)
        self._events.at(self._events.now + first.left / self._pace, end)

    def _end(self, worker: Worker, plan: int) -> None:
        if plan != self._num_plans:
            return  # the pace has changed since, and with it what is next
        self._note_progress()
        _, then = worker.queue.popleft()
        if worker.queue:
            worker.left = worker.queue[0][0]
        else:
            self._busy.remove(worker)
        self._plan()
        then()
