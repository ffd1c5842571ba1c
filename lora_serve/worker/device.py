"""What the data plane needs of a device beyond its kernels: memory, copies, recorded work.

`Device` is the whole contract, and the rest of the worker sees nothing else of CUDA; so a fake
that keeps the contract's rules on the CPU proves that the worker keeps to them. Knows no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.host_copies import HostArray
from lora_serve.ops.recorded_steps import RecordedWork


class Event(Protocol):
    """A point in a device's work."""

    def wait(self) -> None:
        """Until all before it is done, so that what it used may be given away."""

    def is_done(self) -> bool:
        """Whether all before it is done."""


class Device(Protocol):
    """Work is ordered: what was asked for first is done first, in the thread that runs steps.

    torch_device: where its tensors live. name: for logs and results, such as "NVIDIA H200".
    counts_memory: whether it is known what tensors take, so that KV may have all the rest.
    is_asynchronous: whether work goes on while the host does; else it is done when it is asked for.
    """

    torch_device: torch.device
    name: str
    counts_memory: bool
    is_asynchronous: bool

    def upload(self, host: Tensor) -> Tensor:
        """The values of a CPU tensor on the device; the caller may drop `host`, not change it."""

    def fill(self, target: Tensor, host: HostArray) -> None:
        """Give a device's tensor values of its shape and type, of which `upload`'s rule holds."""

    def loading(self) -> AbstractContextManager[None]:
        """Let another thread's work go beside the steps'; it is done when the block ends."""

    def record_event(self) -> Event:
        """The end of what the steps have asked for so far."""

    def free_bytes(self) -> int:
        """Memory that is not held now; what an allocator of ours keeps in reserve is free."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most memory beyond what is held now that `run` takes. Only if `counts_memory`."""

    def record(self, run: Callable[[], Tensor]) -> RecordedWork:
        """Record what `run` does to the device's memory.

        `run` is called several times. Whatever it reads must lie in memory that lives on, at the
        same address, and no choice in it may depend on what the memory holds.
        """


class CpuDevice:
    """Host and device are one: nothing is copied or measured, and what is recorded runs again."""

    torch_device = torch.device("cpu")
    name = "cpu"
    counts_memory = False
    is_asynchronous = False

    def upload(self, host: Tensor) -> Tensor:
        return host

    def fill(self, target: Tensor, host: HostArray) -> None:
        target.numpy()[...] = host

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record_event(self) -> Event:
        return Passed()

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        raise NotImplementedError("a CPU's memory is shared; what a step takes is not counted")

    def record(self, run: Callable[[], Tensor]) -> RecordedWork:
        return RerunWork(run)


class Passed:
    """A mark where work is done when it is asked for."""

    def wait(self) -> None:
        return None

    def is_done(self) -> bool:
        return True


class RerunWork:
    """Recorded work where nothing can be recorded: for kernels that are only interpreted."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self.output = run()

    def replay(self) -> None:
        self.output.copy_(self._run())


def names_gpu(setting: str) -> bool:
    """Whether `--device` names a GPU here.

    Raises:
        ConfigError: it does, and torch sees none.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return False
    if not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} sees no GPU (CUDA it was built for: "
            f"{built}); check `nvidia-smi`, install a CUDA build of torch, or use --device cpu"
        )
    return True


def open_device(setting: str) -> Device:
    """The device that `--device` names.

    Raises:
        ConfigError: for a GPU where torch sees none.
    """
    if not names_gpu(setting):
        return CpuDevice()
    from lora_serve.worker.cuda_device import CudaDevice

    return CudaDevice()


def available_memory_bytes() -> int:
    """Memory this process may still take: the machine's, or its control group's if that is less."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free
