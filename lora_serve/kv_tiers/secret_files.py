"""Reads what only the server may know: keys and passwords, each in a file of its own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.folders.users import user_name

REDIS_PASSWORD = "LORA_SERVE_KV_REDIS_PASSWORD"
MAX_BYTES = 2**16
_TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP  # secrets are mounted for a group to read


def read_secret(flag: str, path: Path) -> str:
    """The text of a file that only its owner can write, and only its owner and group can read.

    Raises:
        ConfigError: it cannot be read, is no text, or its owner or mode leaves it open to others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            _check(flag, path, os.fstat(descriptor))
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{flag} {path}: is longer than {MAX_BYTES} bytes")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: is no text") from None  # the error quotes it


def redis_password(
    path: str | None,
    flag: str = "--kv-redis-password-file",
    variable: str = REDIS_PASSWORD,
) -> str | None:
    """What the file at `path` holds, or else the environment; None if neither has a password.

    flag, variable: which name the file, and the password itself in the environment.

    Raises:
        ConfigError: the file cannot be read, is open to others, or holds more than a line.
    """
    if path is None:
        return os.environ.get(variable)
    password = read_secret(flag, Path(path)).strip("\r\n")
    if not password or "\n" in password:
        raise ConfigError(f"{flag} {path}: must hold one line, the password")
    return password


def _check(flag: str, path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{flag} {path}: is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{flag} {path}: belongs to uid {status.st_uid}, who could change it; "
            f"chown it to {user_name(os.geteuid())} or root"
        )
    if status.st_mode & _TOO_OPEN:
        raise ConfigError(
            f"{flag} {path}: mode {stat.S_IMODE(status.st_mode):04o} lets others read or change "
            f"it; chmod 600 {path}"
        )
