"""Memory for loads, used again when no view of it is left.

The first touch of a fresh page can cost more than reading its bytes from a file in the page cache,
above all on virtual machines.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import numpy.typing as npt

SMALL_BYTES = 2**20  # below this a buffer of its own costs little, and pins little


class ReadBuffers:
    """Thread-safe. Keeps at most `num_kept` buffers of `buffer_bytes` for later."""

    def __init__(self, buffer_bytes: int, num_kept: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._num_kept = num_kept
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> memoryview:
        """A writable view of any content, whose memory is its own as long as any slice lives."""
        if not SMALL_BYTES <= num_bytes <= self._buffer_bytes:
            return np.empty(num_bytes, np.uint8).data
        with self._lock:
            whole = self._free.pop() if self._free else np.empty(self._buffer_bytes, np.uint8)
        lent = whole[:num_bytes]  # an object of its own: when it dies, no view of it is left
        weakref.finalize(lent, self._give_back, whole).atexit = False
        return lent.data

    def _give_back(self, whole: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            if len(self._free) < self._num_kept:
                self._free.append(whole)
