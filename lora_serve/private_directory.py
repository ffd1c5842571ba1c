"""A directory for temporary files that its user alone may read.

However its owner ends, it does not stay for ever: the owner holds a lock while it lives, and the
next directory of the same prefix removes those whose locks are free. It gets its name once its
owner has the lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_LOCK = "owner.lock"
_UNREADY = "."  # before its name
_YOUNG_SECONDS = 60.0  # time enough to take the lock of what was just made


class PrivateDirectory:
    """Made at once, with mode 0700; `close` removes it with all that is in it.

    prefix: of its name. parent: where it is made.
    """

    def __init__(self, prefix: str, parent: Path) -> None:
        _remove_stale(prefix, parent)
        unready = Path(tempfile.mkdtemp(prefix=_UNREADY + prefix, dir=parent))
        self._lock = (unready / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unready.rename(parent / unready.name.removeprefix(_UNREADY))

    def close(self) -> None:
        """May be called again: an owner that is closed twice closes no descriptor of others."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_stale(prefix: str, parent: Path) -> None:
    """Remove directories whose owners ended without `close`."""
    for path in (*parent.glob(f"{prefix}*"), *parent.glob(f"{_UNREADY}{prefix}*")):
        if _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_stale(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:  # another start has just removed it
        return False
    if status.st_uid != os.geteuid() or _has_owner(path):
        return False
    has_had_owner = not path.name.startswith(_UNREADY) and (path / _LOCK).exists()
    return has_had_owner or time.time() - status.st_mtime > _YOUNG_SECONDS


def _has_owner(path: Path) -> bool:
    try:
        with (path / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # its owner ended before there was a lock
        return False
    return False
