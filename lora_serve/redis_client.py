"""Opens Redis or Valkey, and words what goes wrong. Keeps no connection open.

The client library is an extra: importing this module without it is a ModuleNotFoundError.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lora_serve.errors import ConfigError

MAX_REASON_CHARS = 200


def open_redis(
    flag: str, url: str, password: str | None, timeout_seconds: float, **options: Any
) -> Any:
    """A client that connects when first used, and tries nothing twice by itself.

    Args:
        flag: which names the URL, for errors; its password's flag and variable follow from it.
        password: the server's, if it does not stand in the URL.
        timeout_seconds: how long each answer, and a connection, may take.
        options: more of redis-py's own.

    Raises:
        ConfigError: a URL that names no server.
    """
    _check_url(flag, url, password)
    try:
        # any: redis-py types every answer as maybe awaitable
        client: Any = redis.Redis.from_url(
            url,
            password=password,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),  # the caller decides when to try again
            protocol=2,
            **options,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag}: {error}") from error
    return client


def reason_of(error: Exception) -> str:
    """The server's error as one printable line.

    redis-py puts a pipeline's command before it, with its raw bytes.
    """
    said = str(error).rpartition("of pipeline caused error: ")[2].rstrip(".")
    said = said or type(error).__name__
    line = "".join(char if char.isprintable() else "?" for char in said[:MAX_REASON_CHARS])
    return line + "..." if len(said) > MAX_REASON_CHARS else line


def _check_url(flag: str, url: str, password: str | None) -> None:
    """Raises ConfigError for what redis-py would quote in a message, or take one of two of."""
    parts = urlsplit(url)
    password_flag = f"{flag.removesuffix('-url')}-password-file"
    variable = "LORA_SERVE_" + flag.removesuffix("-url").lstrip("-").replace("-", "_").upper()
    hint = (
        f"if that is its password, write its /, @, :, ? and # as %2F, %40, %3A, %3F and %23, or "
        f"use {password_flag}"
    )
    try:
        _ = parts.port
    except ValueError:
        raise ConfigError(f"{flag}: its port is no number; {hint}") from None
    if "@" in parts.path + parts.query + parts.fragment:
        raise ConfigError(f"{flag}: has an @ behind its server's name; {hint}")
    if password is not None and parts.password is not None:
        raise ConfigError(
            f"{flag}: has a password, and another one is given by {password_flag} "
            f"or {variable}_PASSWORD; leave one out"
        )
