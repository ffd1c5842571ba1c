"""Checks who owns a directory: the server's user alone may own it and write there.

A user who can write to it could put other files in the place of ours, and its owner can allow that.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.folders.folder import PRIVATE_DIRECTORY, Folder
from lora_serve.folders.users import user_name

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def open_own(path: Path, flag: str, holds: str) -> Folder:
    """The directory at `path`, made if it is not there.

    Args:
        path: of the directory.
        flag: which named it, for errors.
        holds: what it is for, in a word.

    Raises:
        ConfigError: it is no directory and cannot become one, or others may write to it.
    """
    try:
        _check_link(path, flag)
        with suppress(FileExistsError):
            _make(path)
        folder = Folder.at(path)
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: {error.strerror}; name a directory that can be made"
        ) from error
    try:
        _check(path, folder.status(), flag, holds)
    except ConfigError:
        folder.close()
        raise
    return folder


def open_to_inspect(path: Path) -> Folder:
    """The directory at `path`, whatever its owner. Raises ConfigError if it cannot be opened."""
    try:
        return Folder.at(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _make(path: Path) -> None:
    """And what is missing above it, for this user alone."""
    with suppress(FileExistsError):
        if not path.parent.exists():
            _make(path.parent)
    path.mkdir(PRIVATE_DIRECTORY)


def _check_link(path: Path, flag: str) -> None:
    """A link that another user has put there could lead to any directory of ours."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{flag} {path}: is a link of {user_name(status.st_uid)}; name the directory itself"
            )


def _check(path: Path, status: os.stat_result, flag: str, holds: str) -> None:
    user = os.geteuid()
    if status.st_uid == user and not status.st_mode & _WRITABLE_BY_OTHERS:
        return
    remedy = f"name a directory of its own, such as {path / f'lora-serve-{holds.lower()}'}"
    if status.st_uid == user:
        remedy = f"chmod 700 {path}"
    elif not status.st_mode & stat.S_ISVTX:
        remedy += f", or chown {user_name(user)} {path} && chmod 700 {path}"
    raise ConfigError(
        f"{flag} {path}: belongs to {user_name(status.st_uid)} with mode "
        f"{stat.S_IMODE(status.st_mode):04o}, but {holds} must lie where only the server's user "
        f"{user_name(user)} may write; {remedy}"
    )
