"""Gives every request an id, and every answer that id in X-Request-Id and in request-id.

Anthropic's clients read the latter.

The client's own is taken if it can stand in a header again; it need not be unique.
"""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
SHORT_HEADER = "request-id"
MAX_CHARS = 256


class RequestIds:
    """Middleware, outside of all that may answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        chosen = Headers(scope=scope).get(HEADER, "")
        request_id = chosen if _is_fit(chosen) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def naming_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = headers[SHORT_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, naming_send)


def id_of(request: Request) -> str:
    request_id = request.state.request_id
    assert isinstance(request_id, str), "a route outside of the RequestIds middleware"
    return request_id


def _is_fit(chosen: str) -> bool:
    return 0 < len(chosen) <= MAX_CHARS and chosen.isascii() and chosen.isprintable()
