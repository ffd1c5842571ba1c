"""The TLS of new connections: a certificate that was renewed is taken without a restart."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable

import uvicorn
from uvicorn.config import create_ssl_context

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0


class FreshTLS:
    """The context of new connections, made again when one of its files has changed.

    Files that cannot be used, such as a key whose certificate is still being written, leave the
    last context in place, and are looked at again.
    """

    def __init__(self, config: uvicorn.Config, clock: Callable[[], float] = time.monotonic) -> None:
        """config: loaded, so that it has a context if it is to have one."""
        self._config = config
        self._clock = clock
        self._context = config.ssl
        self._files = [config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs]
        self._seen = self._look()
        self._next_look = clock() + SECONDS_BETWEEN_LOOKS

    def context(self) -> ssl.SSLContext | None:
        """The context that a connection accepted now is to have; None without TLS."""
        now = self._clock()
        if self._context is None or now < self._next_look:
            return self._context
        self._next_look = now + SECONDS_BETWEEN_LOOKS
        seen = self._look()
        if seen != self._seen:
            self._renew(seen)
        return self._context

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_identity(file) for file in self._files]

    def _renew(self, seen: list[tuple[int, int, int] | None]) -> None:
        config = self._config
        assert config.ssl_certfile is not None, "there is a context"
        try:
            self._context = create_ssl_context(
                certfile=config.ssl_certfile,
                keyfile=config.ssl_keyfile,
                password=config.ssl_keyfile_password,
                ssl_version=config.ssl_version,
                cert_reqs=config.ssl_cert_reqs,
                ca_certs=config.ssl_ca_certs,
                ciphers=config.ssl_ciphers,
            )
        except OSError as error:  # TLS's errors are such
            logger.warning("the new files of --ssl-… cannot be used yet: %s", error)
            return
        self._seen = seen
        logger.info("new connections get the certificate that now lies in %s", config.ssl_certfile)


def _identity(file: str | os.PathLike[str] | None) -> tuple[int, int, int] | None:
    """What differs once a file was written or replaced, also through a link; None if it is gone."""
    try:
        found = os.stat(file) if file is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)
