"""A directory for the sockets between an API process and its engine, readable by its user only.

However its owner ends, it does not stay for ever: the owner holds a lock while it lives, and the
next directory to be made removes those whose locks are free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from lora_serve.errors import ConfigError

_PREFIX = "lora-serve-sockets-"
_LOCK = "owner.lock"
_YOUNG_SECONDS = 60.0  # time enough to take the lock of what was just made
_MOST_BYTES = 107  # of a socket's path, by the system's own limit
_LONGEST_NAME = "messages"


class SocketDirectory:
    """parent: where directories are made; the system's place for temporary files if left out.

    Raises:
        ConfigError: its path is too long for the sockets in it.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        remove_stale(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        excess = len(os.fsencode(self.path / _LONGEST_NAME)) - _MOST_BYTES
        if excess > 0:
            self.path.rmdir()
            raise ConfigError(
                f"temporary directory {parent}: sockets in it would have names {excess} bytes "
                f"longer than the system's {_MOST_BYTES}; set TMPDIR to a shorter path"
            )
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_stale(parent: Path) -> None:
    """Remove directories whose owners ended without `close`."""
    for path in parent.glob(f"{_PREFIX}*"):
        if _is_old(path) and not _has_owner(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_old(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:  # another start has just removed it
        return False
    return status.st_uid == os.geteuid() and time.time() - status.st_mtime > _YOUNG_SECONDS


def _has_owner(path: Path) -> bool:
    try:
        with (path / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # its owner ended before there was a lock
        return False
    return False
