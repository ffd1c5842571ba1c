"""Which adapters may run in a step: at most `max_loras` LoRA slots.

An adapter takes a LoRA slot when its oldest request comes up, keeps it while requests of it run,
and gives it back with the last of them: then the adapter whose head is oldest gets it. An adapter
in a slot may first have to be read back into memory; its requests wait meanwhile. If that takes
long, the slot is given back, and the adapter takes one anew when its weights have come.
"""

from __future__ import annotations

from typing import Protocol

from lora_serve.identity import AdapterRef
from lora_serve.scheduler.queue import LoRASlot, Slots, WaitingQueue


class AdapterMemory(Protocol):
    """What the scheduler asks of the part that keeps adapters in the workers' memory."""

    def is_resident(self, ref: AdapterRef) -> bool: ...

    def request_load(self, ref: AdapterRef) -> None:
        """Bring the weights back; the engine calls `Scheduler.adapter_loaded` or `_failed`."""

    def on_running(self, ref: AdapterRef) -> None:
        """A request of this version was admitted: its weights must stay."""

    def on_idle(self, ref: AdapterRef) -> None:
        """One such request has ended."""


class LoRASlots:
    """Decides which adapters have a slot, and keeps the requests behind each in their place.

    slots: the slots that are taken, which the queue reads; this class alone writes them.
    """

    def __init__(
        self, max_loras: int, slots: Slots, queue: WaitingQueue, memory: AdapterMemory
    ) -> None:
        self._max_loras = max_loras
        self._slots = slots
        self._queue = queue
        self._memory = memory
        self._num_given_back = 0

    @property
    def is_free(self) -> bool:
        return len(self._slots) - self._num_given_back < self._max_loras

    @property
    def running(self) -> list[AdapterRef]:
        return [ref for ref, slot in self._slots.items() if slot.num_running]

    def take(self, ref: AdapterRef) -> bool:
        """Give the adapter a slot; False when its weights must be read first."""
        if ref not in self._slots:
            assert self.is_free, f"no LoRA slot for adapter {ref.name}"
            self._slots[ref] = LoRASlot()
            self._queue.slot_changed(ref)
        if self._memory.is_resident(ref):
            return True
        self._slots[ref].is_loading = True
        self._queue.slot_changed(ref)
        self._memory.request_load(ref)
        return False

    def give_back(self, ref: AdapterRef) -> None:
        """Let another adapter have the slot of one whose weights are on their way."""
        slot = self._slots[ref]
        assert slot.is_loading, f"{ref.name} has its weights, and gives its slot back"
        assert not slot.is_given_back, f"{ref.name} gives its slot back twice"
        slot.is_given_back = True
        self._num_given_back += 1

    def load_ended(self, ref: AdapterRef) -> None:
        """The weights have come, or cannot be had: then its requests have left the queue."""
        slot = self._slots[ref]
        slot.is_loading = False
        if slot.is_given_back:
            self._num_given_back -= 1
            self._leave(ref)
            return
        self._queue.slot_changed(ref)
        self._leave_if_unused(ref)

    def start(self, ref: AdapterRef) -> None:
        """A request of an adapter in a slot runs."""
        self._slots[ref].num_running += 1

    def stop(self, ref: AdapterRef) -> None:
        """A request has stopped running: finished, aborted or preempted."""
        slot = self._slots[ref]
        slot.num_running -= 1
        if slot.num_running == 0:
            self._leave(ref)

    def release_unused(self) -> None:
        """Free the LoRA slots of adapters that neither run, load nor have a request in the queue.

        Their requests were aborted, or wait for KV, or for the end of a pause.
        """
        for ref in list(self._slots):
            self._leave_if_unused(ref)

    def _leave_if_unused(self, ref: AdapterRef) -> None:
        slot = self._slots[ref]
        is_idle = slot.num_running == 0 and not slot.is_loading
        if is_idle and not self._queue.has_waiting(ref):
            self._leave(ref)

    def _leave(self, ref: AdapterRef) -> None:
        del self._slots[ref]
        self._queue.slot_changed(ref)

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        given_back = [slot for slot in self._slots.values() if slot.is_given_back]
        assert len(given_back) == self._num_given_back, "slots that were given back are miscounted"
        assert all(slot.is_loading for slot in given_back), "a slot was not taken anew"
        assert len(self._slots) - len(given_back) <= self._max_loras, "more adapters than slots"
        assert all(slot.num_running >= 0 for slot in self._slots.values()), "negative count"
