"""Middleware that counts requests, and generations in state. Changes nothing of an answer."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_serve.observability.http import HTTPMetrics

CLIENT_LEFT = 499  # nginx's status for a request whose client has left


class Instrumentation:
    """Outside of all other middleware, so that it sees the status that is sent.

    generating_paths: those whose requests count as generations.
    """

    def __init__(
        self, app: ASGIApp, metrics: HTTPMetrics, generating_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._generating_paths = generating_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        generates = scope["path"] in self._generating_paths
        started = time.monotonic()
        self._metrics.num_generating += generates
        try:
            await self._app(scope, receive, noting_send)
        finally:
            self._metrics.num_generating -= generates
            seconds = time.monotonic() - started
            self._metrics.observe(route_of(scope), scope["method"], status, seconds)


def route_of(scope: Scope) -> str | None:
    """The path of a request's route as the table has it; None until it has been found."""
    route: str | None = getattr(scope.get("route"), "path", None)
    return route
