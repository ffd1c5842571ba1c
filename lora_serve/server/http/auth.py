"""Who may do what: keys, and which of them may change the server.

A key comes as `Authorization: Bearer KEY`, or as Anthropic's clients send it: `x-api-key: KEY`.

All routes need a key when keys are set, but for those that say nothing of tenants.
/metrics tells of all of them, and needs an admin key where there is one.
What changes the server for others (load, unload, reset) needs an admin key. Where there is none it
is left to --allow-runtime-lora-updating, and to a server without keys on a loopback address. Keys
are compared in constant time. An admin key may do everything that a key may.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError, ForbiddenError, InvalidRequestError, UnauthorizedError
from lora_serve.identity import tenant_salt
from lora_serve.server.http.errors import error_response
from lora_serve.server.http.hosts import check_page_may_change
from lora_serve.server.http.keys import read_keys, warn_of_open_files

logger = logging.getLogger(__name__)

KEY_HEADER = "x-api-key"
METRICS_PATH = "/metrics"  # names adapters: open where there are no keys, or by choice

_REMEDY = "start the server with --admin-api-key, or with --allow-runtime-lora-updating"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. api_key: None if the server is open and no known key was given.

    shown: what the log calls it, by the key's place among those of its kind.
    """

    api_key: str | None
    is_admin: bool
    shown: str = field(default="no key", compare=False)


class KeyRing:
    """The keys of a server. `reload` alone changes them, all at once."""

    def __init__(self, config: ServerConfig) -> None:
        """Raise ConfigError for a key file that cannot be read."""
        self._config = config
        self.reload()

    def reload(self) -> None:
        """Take the key files as they are now.

        Raises:
            ConfigError: one cannot be read, or is empty; the keys stay as they were.
        """
        keys = read_keys(self._config)
        warn_of_open_files(self._config)
        self._is_open = not self._config.requires_api_key
        self._has_admin_key = bool(keys.admin)
        all_may_change = not keys.admin and (
            self._config.allow_runtime_lora_updating or (self._is_open and self._config.is_local)
        )
        self._anyone = Caller(None, is_admin=all_may_change)
        # By digest, so that the time of a comparison reveals neither a key's length nor its text.
        self._keys = [
            *(
                (_digest(key.encode()), Caller(key, True, f"admin key {place}"))
                for place, key in enumerate(keys.admin, 1)
            ),
            *(
                (_digest(key.encode()), Caller(key, all_may_change, f"key {place}"))
                for place, key in enumerate(keys.api, 1)
                if key not in keys.admin
            ),
        ]

    def reload_or_keep(self) -> None:
        """Reload, with errors going to the log."""
        try:
            self.reload()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("read again: %s", self.describe())

    def identify(self, headers: Headers) -> Caller:
        """Whose key these headers hold; of two known ones, that of Authorization.

        Raises:
            UnauthorizedError: no known key, and the server is not open.
        """
        authorization, plain = headers.get("authorization"), headers.get(KEY_HEADER)
        for caller in (self._find(_bearer(authorization)), self._find(plain)):
            if caller is not None:
                return caller
        if not self._is_open:
            raise UnauthorizedError(_fault_of_key(authorization, plain))
        return self._anyone

    def require_admin(self, request: Request, asked: str = "this changes the server") -> None:
        """Raise unless the request's sender, and its page if it has one, may change the server.

        asked: what the request does, for the error.
        """
        caller = caller_of(request)
        if caller.is_admin:
            check_page_may_change(request.headers, self._config.allowed_origins)
            return
        if caller.api_key is None:
            raise UnauthorizedError(
                f"{asked} and needs an admin API key, sent as `Authorization: "
                f"Bearer KEY`{'' if self._has_admin_key else f'; {_REMEDY}'}"
            )
        remedy = "that needs an admin API key" if self._has_admin_key else _REMEDY
        raise ForbiddenError(f"{asked.rstrip(',')}, and this API key may not; {remedy}")

    @property
    def guards_metrics(self) -> bool:
        """Whether /metrics needs a key: it names every tenant's adapters, and counts their use."""
        return self._config.has_keys and self._config.metrics_need_key

    def is_operator(self, caller: Caller) -> bool:
        """Whether `caller` may see what concerns all callers: an admin, where there is one."""
        return caller.is_admin or not self._has_admin_key

    def require_operator(self, caller: Caller) -> None:
        """Raise unless `is_operator`."""
        if self.is_operator(caller):
            return
        remedy = "needs an admin API key; or read it from --metrics-port"
        if caller.api_key is None:
            raise UnauthorizedError(f"this shows what all callers do, and {remedy}")
        raise ForbiddenError(f"this API key may not see what all callers do: that {remedy}")

    def cache_salt(self, caller: Caller, cache_salt: str) -> str:
        """The salt to key the caller's KV with: the client's own, or its key's mixed in."""
        if not self._config.isolates_keys:
            return cache_salt
        return tenant_salt(caller.api_key or "", cache_salt)

    def check_priority(self, caller: Caller, priority: int) -> None:
        """Raise InvalidRequestError if others may not be overtaken as far as `priority` would."""
        lowest = self._config.min_priority
        if priority < lowest and not caller.is_admin:
            raise InvalidRequestError(
                f"priority {priority} is below --min-priority {lowest}; ask for {lowest} or more, "
                "or send an admin API key",
                "priority",
            )

    def describe(self) -> str:
        """Who shares what, for the log; "" without keys."""
        if not self._config.has_keys:
            return ""
        if self._config.isolates_keys:
            shared = "each finds its own cached KV alone (--no-isolate-api-keys shares it)"
        else:
            shared = "cached KV is shared: time and cached_tokens tell one what another sent"
        return f"API keys: {len(self._keys)}; {shared}"

    def tenant(self, caller: Caller) -> str:
        """Names the caller's key without telling it; one name for all who have none."""
        return _digest(caller.api_key.encode()).hex() if caller.api_key is not None else ""

    def _find(self, key: str | None) -> Caller | None:
        if key is None:
            return None
        digest = _digest(key.strip().encode("latin-1"))  # as the header's bytes came
        found = None
        for known, caller in self._keys:  # all of them, always
            if hmac.compare_digest(known, digest) and found is None:
                found = caller
        return found


class Authentication:
    """Middleware that lets in known callers, and notes in the request's state who they are.

    open_paths: those that need no key.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                caller = self._keys.identify(Headers(scope=scope))
            except UnauthorizedError as error:
                await error_response(error, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """The sender of this request, on any route that is not open to all."""
    caller = request.state.caller
    assert isinstance(caller, Caller), "a route outside of the Authentication middleware"
    return caller


def share_of(request: Request) -> str:
    """Whose share of a room this request takes from: its API key's, or "" for all without one."""
    return caller_of(request).api_key or ""


def _fault_of_key(authorization: str | None, plain: str | None) -> str:
    """What is wrong with the headers of a request that has no known key."""
    how = f"send it as `Authorization: Bearer KEY`, or in {KEY_HEADER}"
    if not (authorization or plain):
        return f"no API key given; {how}"
    if authorization and not plain and _bearer(authorization) is None:
        return f"Authorization holds no API key in the form `Bearer KEY`; {how}"
    return "unknown API key"


def _bearer(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").partition(" ")
    return key if scheme.lower() == "bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
