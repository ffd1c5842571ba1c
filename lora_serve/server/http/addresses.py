"""How many connections each client address has. Knows no key: those come with requests, later."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter

from lora_serve.server.http.errors import TooManyConnectionsError

IPV6_PREFIX = 64  # of a network that one client can take addresses of at will


class AddressLimit:
    """Connections by address, at most `limit` each; 0 for any number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def check(self, address: str) -> None:
        """Raise TooManyConnectionsError if this address may have no further connection."""
        if self._limit and address and self._counts[address] >= self._limit:
            raise TooManyConnectionsError(
                f"connections from this address: {self._limit}, and no more are allowed "
                "(--max-connections-per-address); close some, or retry later"
            )

    def add(self, address: str) -> None:
        self._counts[address] += 1

    def remove(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


def address_of(accepted: socket.socket) -> str:
    """The client's address, or of IPv6 its network; "" on a Unix socket, or if it is gone again."""
    try:
        peer = accepted.getpeername()
    except OSError:
        return ""
    if accepted.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
