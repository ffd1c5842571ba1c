"""The end of a server: it answers what it has begun, and refuses what comes late.

Knows no engine and no signal; `shutdown.py` decides when it begins.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from lora_serve.errors import EngineDeadError
from lora_serve.server.http.errors import error_response


class Drain:
    """Counts the requests that are being answered."""

    def __init__(self) -> None:
        self._has_begun = False
        self._num_active = 0

    @property
    def num_active(self) -> int:
        return self._num_active

    def begin(self) -> None:
        """Have `check` raise from here on."""
        self._has_begun = True

    def check(self) -> None:
        """Raise EngineDeadError once the server is about to end."""
        if self._has_begun:
            raise EngineDeadError("the server is shutting down; send this to another one")

    def enter(self) -> None:
        self._num_active += 1

    def leave(self) -> None:
        self._num_active -= 1


class Draining:
    """Middleware that counts requests, and refuses them once the drain has begun.

    state_paths: the routes that show the server's state, which go on.
    """

    def __init__(self, app: ASGIApp, drain: Drain, state_paths: frozenset[str]) -> None:
        self._app = app
        self._drain = drain
        self._state_paths = state_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._state_paths:
            await self._app(scope, receive, send)
            return
        try:
            self._drain.check()
        except EngineDeadError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()
