"""HTTP clients that share what they trust: reading the machine's certificates takes each 25 ms."""

from __future__ import annotations

from functools import cache

from httpx._transports import default


def install() -> None:
    """Have clients with the same settings use one context, for good."""
    default.create_ssl_context = cache(default.create_ssl_context)
