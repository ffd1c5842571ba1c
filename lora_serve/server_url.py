"""Addresses of servers, as users of the commands write them."""

from __future__ import annotations

from urllib.parse import urlsplit

from lora_serve.errors import ConfigError


def base_url(url: str, also: str = "") -> str:
    """The URL that routes are added to: with a scheme, and without /v1, which the routes bring.

    Args:
        url: HOST:PORT, or a URL of HTTP or HTTPS.
        also: what else the caller takes, such as "unix:/PATH", for the error.

    Raises:
        ConfigError: it is no such URL.
    """
    whole = url if "://" in url else f"http://{url}"
    if not _is_http(whole):
        wanted = ["http://HOST:PORT", "https://HOST", *filter(None, [also])]
        told = f"{', '.join(wanted[:-1])} or {wanted[-1]}"
        raise ConfigError(f"--url {url}: want {told}")
    return whole.rstrip("/").removesuffix("/v1")


def without_password(url: str) -> str:
    """The URL as reports and logs may show it: without a user and a password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _is_http(url: str) -> bool:
    """Whether it has a scheme of HTTP, a host and a port from 1 to 65535, if it names one."""
    if not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # an open bracket, a port above 65535, a label above 63 characters
        return False
