"""Reads a file that may be anything: a pipe, a device, or far larger than what it is said to be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lora_serve.errors import ConfigError

MAX_JSON_BYTES = 16 * 2**20  # a model's settings; those of tokenizers with many tokens have 2 MB


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All of a file, which may have so many bytes. Never waits for another process to write it.

    Raises:
        ConfigError: it is no regular file, or longer.
        OSError: it is not there, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is not a regular file; put the file itself there")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ConfigError(
            f"{path} has more than {most_bytes:,} bytes, the most that such a file of a model may "
            "have; is it another file?"
        )
    return content
