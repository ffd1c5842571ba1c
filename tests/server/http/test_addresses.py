from __future__ import annotations

from typing import Any, cast

import pytest

from lora_serve.server.http.addresses import AddressLimit, address_of
from lora_serve.server.http.errors import TooManyConnectionsError


class Accepted:
    """A socket, as far as it is looked at."""

    def __init__(self, family: int, peer: object) -> None:
        self.family = family
        self._peer = peer

    def getpeername(self) -> object:
        if isinstance(self._peer, OSError):
            raise self._peer
        return self._peer


@pytest.mark.parametrize(
    ("family", "peer", "address"),
    [
        (2, ("10.0.0.7", 5000), "10.0.0.7"),
        (10, ("::ffff:10.0.0.7", 5000, 0, 0), "10.0.0.7"),
        (10, ("2001:db8:1:2:3:4:5:6", 5000, 0, 0), "2001:db8:1:2::/64"),
        (10, ("fe80::1%eth0", 5000, 0, 2), "fe80::/64"),
        (1, "", ""),
        (2, OSError("it has gone"), ""),
    ],
)
def test_clients_are_told_apart_by_address(family: int, peer: object, address: str) -> None:
    assert address_of(cast(Any, Accepted(family, peer))) == address


def test_an_address_that_gives_connections_back_may_have_others() -> None:
    limit = AddressLimit(1)
    limit.add("a")
    limit.check("b")
    with pytest.raises(TooManyConnectionsError, match="--max-connections-per-address"):
        limit.check("a")
    limit.remove("a")
    limit.check("a")


def test_unix_sockets_and_no_limit_count_nothing() -> None:
    limit = AddressLimit(1)
    limit.add("")
    limit.check("")
    unlimited = AddressLimit(0)
    unlimited.add("a")
    unlimited.check("a")
