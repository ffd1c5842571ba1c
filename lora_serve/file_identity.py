"""Tells a file apart from what it was before by its inode, size and times, as git does.

Reading all of it would take the time that is to be saved.
"""

from __future__ import annotations

import os
import time

SETTLED_SECONDS = 2.0  # file systems keep times in steps of up to so many


def file_identity(status: os.stat_result) -> tuple[int, ...] | None:
    """What is equal only as long as the file is the same.

    None for one that changed just now: a step of the clock may hide a second change.
    """
    if time.time() - status.st_ctime < SETTLED_SECONDS:
        return None
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return status.st_dev, status.st_ino, status.st_size, *times
