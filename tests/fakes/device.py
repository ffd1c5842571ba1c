"""Devices on the CPU that keep the rules of real ones, and hold those who use them to the rules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lora_serve.host_copies import HostArray
from lora_serve.ops.recorded_steps import RecordedWork
from lora_serve.worker.device import Event, Passed, RerunWork


class RecordingDevice:
    """Copies on every upload, as a GPU does, and counts what is asked of it."""

    torch_device = torch.device("cpu")
    name = "recording fake"
    counts_memory = False
    is_asynchronous = False

    def __init__(self, free_bytes: int = 2**30) -> None:
        self._free_bytes = free_bytes
        self.num_recorded = 0
        self.num_replays = 0
        self.num_loads = 0

    def upload(self, host: Tensor) -> Tensor:
        return host.clone()

    def fill(self, target: Tensor, host: HostArray) -> None:
        target.copy_(torch.from_numpy(host))

    def loading(self) -> AbstractContextManager[None]:
        self.num_loads += 1
        return nullcontext()

    def record_event(self) -> Event:
        return Passed()

    def free_bytes(self) -> int:
        return self._free_bytes

    def peak_bytes(self, run: Callable[[], object]) -> int:
        raise NotImplementedError("this device does not count")

    def record(self, run: Callable[[], Tensor]) -> RecordedWork:
        self.num_recorded += 1
        return CountedWork(self, RerunWork(run))


class CountedWork:
    def __init__(self, device: RecordingDevice, work: RerunWork) -> None:
        self._device = device
        self._work = work
        self.output = work.output

    def replay(self) -> None:
        self._device.num_replays += 1
        self._work.replay()


class CountingDevice(RecordingDevice):
    """A card of `free_bytes` on which weights take `weight_bytes`, and a step as the test says."""

    counts_memory = True

    def __init__(self, free_bytes: int, weight_bytes: int, peaks: list[int]) -> None:
        super().__init__(free_bytes)
        self._weight_bytes = weight_bytes
        self._peaks = peaks
        self.measured: list[object] = []

    def free_bytes(self) -> int:
        free = self._free_bytes
        self._free_bytes -= self._weight_bytes  # the model is loaded between the first two looks
        self._weight_bytes = 0
        return free

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self.measured.append(run())
        return self._peaks.pop(0)
