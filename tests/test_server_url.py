"""Addresses of servers: what is read, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_serve.bench.http_stream import Origin
from lora_serve.check.server import Target
from lora_serve.cli.remote import Remote
from lora_serve.errors import ConfigError
from lora_serve.server_url import base_url

NO_URLS = (
    "http://",
    "ftp://host",
    "http://host:port",
    "http://host:0",
    "http://host:65536",
    "http://[::1",
    "http://a b",
    "http://a\tb",
    "http://" + "a" * 64,
)
READERS = {
    "check": lambda url: Target(url=url).base_url,
    "bench": Origin.parse,
    "other commands": lambda url: Remote(url, None),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_url_is_refused_by_every_command(
    url: str, read: Callable[[str], object]
) -> None:
    with pytest.raises(ConfigError, match="want http://HOST:PORT"):
        read(url)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("host:8000", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("https://host/behind/v1/", "https://host/behind"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://user:word@host", "http://user:word@host"),
    ],
)
def test_a_url_loses_the_end_that_routes_bring(url: str, base: str) -> None:
    assert base_url(url) == base
