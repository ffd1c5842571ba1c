"""Where API keys come from: flags, the environment, and files that are read again on SIGHUP.

An empty key is never accepted: `--api-key "$UNSET"` must not make `Authorization: Bearer` a key.
Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import logging
import stat
from dataclasses import dataclass
from pathlib import Path

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError

COMMENT = "#"
_TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP  # secrets are mounted for a group to read

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """All keys at one moment, each as it is sent. A key in both is an admin's."""

    api: tuple[str, ...]
    admin: tuple[str, ...]


def read_keys(config: ServerConfig) -> ApiKeys:
    """The keys of the configuration and, as they are now, those of its key files.

    Raises:
        ConfigError: a key file that cannot be read, or that holds no key.
    """
    return ApiKeys(
        (*config.api_key, *_keys_of("--api-key-file", config.api_key_file)),
        (*config.admin_api_key, *_keys_of("--admin-api-key-file", config.admin_api_key_file)),
    )


def warn_of_open_files(config: ServerConfig) -> None:
    """Warn of each key file that others than its owner and group may read or change."""
    files = {
        "--api-key-file": config.api_key_file,
        "--admin-api-key-file": config.admin_api_key_file,
    }
    for flag, path in files.items():
        if path is None:
            continue
        with contextlib.suppress(OSError):  # it has been read, but may be gone by now
            mode = stat.S_IMODE(Path(path).stat().st_mode)
            if mode & _TOO_OPEN:
                told = "%s %s: mode %04o lets others read or change it; chmod 600 %s"
                logger.warning(told, flag, path, mode, path)


def _keys_of(flag: str, path: str | None) -> tuple[str, ...]:
    """One key a line; blank lines and lines that begin with # count for nothing."""
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from error
    stripped = (line.strip() for line in lines)
    keys = tuple(line for line in stripped if line and not line.startswith(COMMENT))
    if not keys:
        raise ConfigError(f"{flag} {path} holds no key; write one key a line")
    return keys
