"""Bearer keys: which callers are known, and which of them are operators.

All routes need a key when keys are set, but for those that say nothing of tenants (OPEN_PATHS).
Keys are compared in constant time. An admin key may do everything that a key may.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lora_serve.config import ServerConfig
from lora_serve.errors import ForbiddenError, UnauthorizedError
from lora_serve.identity import tenant_salt
from lora_serve.server.http.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. api_key: None if the server is open and no known key was given."""

    api_key: str | None
    is_admin: bool


class KeyRing:
    """The configured keys."""

    def __init__(self, config: ServerConfig) -> None:
        self._is_open = not config.api_key
        self._has_admins = bool(config.admin_api_key)
        self._isolates = config.isolate_api_keys
        # By digest, so that the time of a comparison tells neither a key's length nor its text.
        self._keys = [
            *((_digest(key.encode()), Caller(key, True)) for key in config.admin_api_key),
            *(
                (_digest(key.encode()), Caller(key, not self._has_admins))
                for key in config.api_key
                if key not in config.admin_api_key
            ),
        ]

    def identify(self, authorization: str | None) -> Caller:
        """Whose key this header's value holds.

        Raises:
            UnauthorizedError: no known key, and the server is not open.
        """
        caller = self._find(authorization)
        if caller is not None:
            return caller
        if not self._is_open:
            raise UnauthorizedError(
                "unknown API key"
                if authorization
                else "no API key given; send it as `Authorization: Bearer KEY`"
            )
        return Caller(None, is_admin=not self._has_admins)

    def require_admin(self, caller: Caller) -> None:
        """Raise unless `caller` may change what others see."""
        if caller.is_admin:
            return
        if caller.api_key is None:
            raise UnauthorizedError("this needs an admin API key; send it as a Bearer key")
        raise ForbiddenError("this API key may not do that; use one of --admin-api-key")

    def cache_salt(self, caller: Caller, cache_salt: str) -> str:
        """The salt to key the caller's KV with: the client's own, or its key's mixed in."""
        if not self._isolates:
            return cache_salt
        return tenant_salt(caller.api_key or "", cache_salt)

    def tenant(self, caller: Caller) -> str:
        """Names the caller's key without telling it; one name for all who have none."""
        return _digest(caller.api_key.encode()).hex() if caller.api_key is not None else ""

    def _find(self, authorization: str | None) -> Caller | None:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(key.strip().encode("latin-1"))  # as the header's bytes came
        found = None
        for known, caller in self._keys:  # all of them, always
            if hmac.compare_digest(known, digest) and found is None:
                found = caller
        return found


class Authentication:
    """Middleware that lets in known callers, and notes in the request's state who they are."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                caller = self._keys.identify(Headers(scope=scope).get("authorization"))
            except UnauthorizedError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """The sender of this request, on any route that is not open to all."""
    caller = request.state.caller
    assert isinstance(caller, Caller), "a route outside of the Authentication middleware"
    return caller


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
