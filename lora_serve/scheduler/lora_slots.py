"""Which adapters may run in a step: at most `max_loras` LoRA slots.

An adapter takes a LoRA slot when its oldest request comes up, keeps it while requests of it run,
and gives it back with the last of them: then the adapter whose head is oldest gets it. An adapter
in a slot may first have to be read back into memory; its requests are held meanwhile.
"""

from __future__ import annotations

from typing import Protocol

from lora_serve.identity import AdapterRef
from lora_serve.scheduler.queue import WaitingQueue


class AdapterMemory(Protocol):
    """What the scheduler asks of whoever keeps adapters in the workers' memory."""

    def is_resident(self, ref: AdapterRef) -> bool: ...

    def request_load(self, ref: AdapterRef) -> None:
        """Bring the weights back; the engine calls `Scheduler.adapter_loaded` or `_failed`."""

    def on_running(self, ref: AdapterRef) -> None:
        """A request of this version was admitted: its weights must stay."""

    def on_idle(self, ref: AdapterRef) -> None:
        """One such request has ended."""


class LoRASlots:
    """Seats and their adapters; keeps the queue informed of who has one."""

    def __init__(self, max_loras: int, queue: WaitingQueue, memory: AdapterMemory) -> None:
        self._max_loras = max_loras
        self._queue = queue
        self._memory = memory
        self._num_running: dict[AdapterRef, int] = {}  # has a key for every adapter in a slot
        self._loading: set[AdapterRef] = set()

    @property
    def is_free(self) -> bool:
        return len(self._num_running) < self._max_loras

    @property
    def running(self) -> list[AdapterRef]:
        return [ref for ref, num_running in self._num_running.items() if num_running]

    def claim(self, ref: AdapterRef) -> bool:
        """Seat the adapter; False when its weights must be read first (its requests are held)."""
        if ref not in self._num_running:
            assert self.is_free, f"no LoRA slot for adapter {ref.name}"
            self._num_running[ref] = 0
            self._queue.enter_slot(ref)
        if self._memory.is_resident(ref):
            return True
        self._loading.add(ref)
        self._queue.hold(ref)
        self._memory.request_load(ref)
        return False

    def loaded(self, ref: AdapterRef) -> None:
        self._loading.remove(ref)
        self._queue.unhold(ref)
        self._leave_if_unused(ref)

    def failed(self, ref: AdapterRef) -> None:
        """The weights cannot be had; whoever waited for them has been taken off the queue."""
        self.loaded(ref)

    def start(self, ref: AdapterRef) -> None:
        """A request of an adapter in a slot runs."""
        self._num_running[ref] += 1

    def stop(self, ref: AdapterRef) -> None:
        """A request has stopped running: finished, aborted or preempted."""
        self._num_running[ref] -= 1
        if self._num_running[ref] == 0:
            self._leave(ref)

    def release_unused(self) -> None:
        """Free the LoRA slots of adapters whose waiting requests have all been aborted."""
        for ref in list(self._num_running):
            self._leave_if_unused(ref)

    def _leave_if_unused(self, ref: AdapterRef) -> None:
        is_idle = self._num_running.get(ref) == 0 and ref not in self._loading
        if is_idle and not self._queue.has_waiting(ref):
            self._leave(ref)

    def _leave(self, ref: AdapterRef) -> None:
        del self._num_running[ref]
        self._queue.leave_slot(ref)

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        assert len(self._num_running) <= self._max_loras, "more adapters than slots"
        assert self._loading <= set(self._num_running), "an adapter loads without a LoRA slot"
        assert all(count >= 0 for count in self._num_running.values()), "negative running count"
