"""Server-sent events: their form, and how a stream ends when the engine fails or a client leaves.

A stream ends with `data: [DONE]`, also after an error, which is then the event before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lora_serve.server.http.disconnect import unless_disconnected
from lora_serve.server.http.errors import error_body
from lora_serve.server.http.json_response import encode

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events
}


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


class EventStream(Response):
    """Sends events as they come, and calls `close` at the end, however it comes."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]  # of the empty body that the base class knows
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except ClientDisconnect:
            pass  # there is no client left to answer
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            data = b"data: " + error_body(error) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
