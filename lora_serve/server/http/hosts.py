"""Which names a server answers to, and which pages may ask it.

A browser lets any page send requests to this machine: to a name of its own that it makes point
here (DNS rebinding), or across origins without reading the answer. Such requests carry the name
(Host) or the page (Origin), which no page can forge. Keys protect the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lora_serve.config import ServerConfig
from lora_serve.config.server import is_loopback
from lora_serve.errors import ForbiddenError, InvalidRequestError
from lora_serve.server.http.errors import error_response

DEFAULT_PORTS = {"http": 80, "https": 443}
NAME = r"(?P<name>\[[0-9A-Fa-f:.]+\]|[\w.~%-]+)"
HOST = re.compile(rf"{NAME}?(?P<port>:[0-9]*)?", re.ASCII)
ORIGIN = re.compile(
    rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://{NAME}(?P<port>:[0-9]{{1,5}})?", re.ASCII
)


class AllowedHosts:
    """The hosts of --allowed-hosts; without it every loopback name, on a loopback address.

    host: the address that is listened on; that of --host or --uds if left out.
    """

    def __init__(self, config: ServerConfig, host: str | None = None) -> None:
        self._names = frozenset(name.lower() for name in config.allowed_hosts)
        self._origins = frozenset(config.allowed_origins)
        is_local = config.is_local if host is None else is_loopback(host)
        self._allows_any = not self._names and not is_local

    def check(self, headers: Headers) -> None:
        """Judge the only Host that there may be, and each Origin.

        Raises:
            InvalidRequestError: several hosts, or none that could be one.
            ForbiddenError: a host or an origin that is not allowed here.
        """
        host = _only_host(headers)
        if self._allows_any:
            return
        if not self._allows(host):
            raise ForbiddenError(
                f"this server does not answer to the host {host[:80]!r}; name it with "
                "--allowed-hosts if it should"
            )
        for origin in headers.getlist("origin"):
            if not (self._is_named(origin) or self._comes_from_allowed(origin)):
                raise ForbiddenError(
                    f"pages of the origin {origin[:80]!r} may not use this server; name its host "
                    "with --allowed-hosts, or the origin with --allowed-origins, if they may"
                )

    def names_origin(self, origin: str) -> bool:
        """Whether a page comes from a host that the server answers to by name, and not as any."""
        return not self._allows_any and self._comes_from_allowed(origin)

    def _comes_from_allowed(self, origin: str) -> bool:
        parts = ORIGIN.fullmatch(origin)
        return parts is not None and self._allows(_name_in(parts))

    def _is_named(self, origin: str) -> bool:
        return origin in self._origins or "*" in self._origins

    def _allows(self, name: str) -> bool:
        return name in self._names if self._names else is_loopback(name)


class HostCheck:
    """Middleware that refuses requests for other hosts and from other pages."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._hosts.check(Headers(scope=scope))
            except (ForbiddenError, InvalidRequestError) as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def check_page_may_change(headers: Headers, allowed_origins: Sequence[str]) -> None:
    """Raise ForbiddenError for a page that may not change the server, for all that it may use.

    Pages of the server's own host and port may, and those that are named. A page of another port of
    this machine is another program's.
    """
    for origin in headers.getlist("origin"):
        if "*" in allowed_origins or origin in allowed_origins:
            continue
        own = _address_of(f"{origin.partition(':')[0]}://{headers.get('host', '')}")
        if own is None or _address_of(origin) != own:
            raise ForbiddenError(
                f"pages of the origin {origin[:80]!r} may not change this server; name the origin "
                "with --allowed-origins if they may, or send the request without a browser"
            )


def _only_host(headers: Headers) -> str:
    """The name in the Host header; empty without one. Proxies might have judged by another."""
    hosts = headers.getlist("host")
    if len(hosts) > 1:
        raise InvalidRequestError(
            f"the request has {len(hosts)} Host headers, 1 is allowed; send the first alone"
        )
    parts = HOST.fullmatch(hosts[0] if hosts else "")
    if parts is None:
        raise InvalidRequestError(
            f"the Host header {hosts[0][:80]!r} is not a name or address with an optional port; "
            "send it as in `Host: localhost:8000`"
        )
    return _name_in(parts)


def _address_of(origin: str) -> tuple[str, int] | None:
    """The host and port of an http origin; none of what is not one, such as null."""
    parts = ORIGIN.fullmatch(origin)
    if parts is None or parts["scheme"].lower() not in DEFAULT_PORTS:
        return None
    port = int(parts["port"][1:]) if parts["port"] else DEFAULT_PORTS[parts["scheme"].lower()]
    return _name_in(parts), port


def _name_in(parts: re.Match[str]) -> str:
    """The host of what matched, in lower case and without the brackets of an address."""
    return (parts["name"] or "").strip("[]").lower()
