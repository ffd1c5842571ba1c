"""A private directory for the sockets between an API process and its engine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.private_directory import PrivateDirectory

_PREFIX = "lora-serve-sockets-"
_MOST_BYTES = 107  # of a socket's path, by the system's own limit
_LONGEST_NAME = "messages"


class SocketDirectory(PrivateDirectory):
    """parent: where directories are made; the system's place for temporary files if left out.

    Raises:
        ConfigError: its path is too long for the sockets in it.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        super().__init__(_PREFIX, parent)
        excess = len(os.fsencode(self.path / _LONGEST_NAME)) - _MOST_BYTES
        if excess > 0:
            self.close()
            raise ConfigError(
                f"temporary directory {parent}: sockets in it would have names {excess} bytes "
                f"longer than the system's {_MOST_BYTES}; set TMPDIR to a shorter path"
            )
