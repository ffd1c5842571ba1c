"""Values between the host and a device, in the order of the device's work. Only `wait` waits.

Where the host is the device nothing is copied. Knows nothing of what the values mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HostArray = npt.NDArray[np.generic]  # of any dtype


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The values of a CPU tensor on the device; the caller may drop `host`, not change it."""
    if device.type != "cuda" or not host.numel():
        return host.to(device)
    # torch gives pinned memory to others only when the copies out of it are done.
    return host.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Values that will be on the host when the work that was asked for before is done."""

    def __init__(self, values: Tensor, done: torch.cuda.Event | None) -> None:
        self._values = values
        self._done = done

    @property
    def is_there(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> Tensor:
        """The values, once they are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._values


def to_host(source: Tensor) -> HostCopy:
    """Begin to copy a tensor that is not written again."""
    if source.device.type != "cuda":
        return HostCopy(source, None)
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    pinned.copy_(source, non_blocking=True)
    return in_use(pinned)


def in_use(pinned: Tensor) -> HostCopy:
    """Pinned memory that the work asked for so far still reads or writes; keep this until then."""
    done = torch.cuda.Event()
    done.record()
    return HostCopy(pinned, done)
