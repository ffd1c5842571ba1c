"""What the system does for connections: files for them, and an end to those that take nothing."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket

logger = logging.getLogger(__name__)

RESERVED_FILES = 128  # that a server opens besides connections: tokenizers, sockets, logs
LONGEST_USER_TIMEOUT = 2**31 - 1  # milliseconds, the system's limit: 24 days


def allowed_connections(wanted: int) -> int:
    """How many the system lets this process have, at most `wanted`; raises its soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(1, soft - RESERVED_FILES)
    logger.warning(
        "at most %d connections can be open, not --max-connections %d: the system allows this "
        "process %d files (ulimit -Hn)",
        allowed,
        wanted,
        soft,
    )
    return allowed


def limit_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Have the system end the connection once nothing of what waits was taken for so long.

    It sees each byte that is taken; from here only whole buffers of megabytes can be seen to go. A
    Unix socket has no such clock.
    """
    connection = transport.get_extra_info("socket")
    if seconds and connection.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = max(1, round(min(1000 * seconds, LONGEST_USER_TIMEOUT)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
