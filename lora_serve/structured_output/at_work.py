"""Which answer the grammars' process is working on, for the engine's process to read at its end.

It is memory that both have, because a process that hangs or is killed can send nothing.
"""

from __future__ import annotations

import mmap
import os

_NUM_BYTES = 4096
_LENGTH_BYTES = 2
_MAX_NAME_BYTES = _NUM_BYTES - _LENGTH_BYTES


class AtWork:
    """One name in memory that is shared with the process that inherits `number`."""

    def __init__(self, number: int | None = None) -> None:
        """number: the file descriptor that was inherited; None makes new memory."""
        if number is None:
            number = os.memfd_create("at-work")
            os.truncate(number, _NUM_BYTES)
        self.number = number
        self._memory = mmap.mmap(number, _NUM_BYTES)

    def note(self, request_id: str) -> None:
        """Write down the answer that is worked on; "" if none is."""
        name = request_id.encode()[:_MAX_NAME_BYTES]
        self._memory[: _LENGTH_BYTES + len(name)] = len(name).to_bytes(_LENGTH_BYTES) + name

    def read(self) -> str:
        """The answer that is worked on; "" if none is, or the name is cut short."""
        length = int.from_bytes(self._memory[:_LENGTH_BYTES])
        name = self._memory[_LENGTH_BYTES : _LENGTH_BYTES + length]
        return name.decode(errors="ignore") if length < _MAX_NAME_BYTES else ""

    def close(self) -> None:
        self._memory.close()
        os.close(self.number)
