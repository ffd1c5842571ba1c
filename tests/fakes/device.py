"""Devices on the CPU that keep the rules of real ones, and hold those who use them to the rules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class RecordingDevice:
    """What is recorded is the closure; a replay runs it again into the output it had first.

    As on a GPU, nothing a step left on the host can reach recorded work, and its output stays at
    one address. Memory is told as the test says: `peaks` are given out one by one.
    """

    torch_device = torch.device("cpu")
    name = "recording fake"
    counts_memory = False

    def __init__(self, free_bytes: int = 2**30) -> None:
        self._free_bytes = free_bytes
        self.num_recorded = 0
        self.num_replays = 0
        self.num_loads = 0

    def upload(self, host: Tensor) -> Tensor:
        return host.clone()

    def fill(self, target: Tensor, host: Tensor) -> None:
        target.copy_(host)

    def loading(self) -> AbstractContextManager[None]:
        self.num_loads += 1
        return nullcontext()

    def free_bytes(self) -> int:
        return self._free_bytes

    def peak_bytes(self, run: Callable[[], object]) -> int:
        raise NotImplementedError("this device does not count")

    def record(self, run: Callable[[], Tensor]) -> RerunWork:
        run()
        self.num_recorded += 1
        return RerunWork(self, run)


class RerunWork:
    def __init__(self, device: RecordingDevice, run: Callable[[], Tensor]) -> None:
        self._device = device
        self._run = run
        self.output = run()

    def replay(self) -> None:
        self._device.num_replays += 1
        self.output.copy_(self._run())


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
