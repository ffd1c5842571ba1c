"""Which pages may read answers, besides those of this server (CORS).

HostCheck says which pages may send requests at all; these flags never allow less than a page needs
to be answered, nor more than they name. Without any, pages of the hosts that the server answers to
by name may read: on a loopback address those of this machine.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from lora_serve.config import ServerConfig
from lora_serve.server.http.hosts import AllowedHosts
from lora_serve.server.http.request_ids import HEADER


class CrossOrigin(CORSMiddleware):
    """Middleware that answers preflights, and names the origin in answers to pages."""

    def __init__(self, app: ASGIApp, config: ServerConfig, hosts: AllowedHosts) -> None:
        super().__init__(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=(HEADER, "Retry-After"),
        )
        self._hosts = hosts
        self._is_default = not config.allowed_origins

    def is_allowed_origin(self, origin: str) -> bool:
        if self._is_default:
            return self._hosts.names_origin(origin)
        return super().is_allowed_origin(origin)
