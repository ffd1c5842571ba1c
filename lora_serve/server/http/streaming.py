"""Server-sent events: their form, and how a stream ends when the engine fails or a client leaves.

OpenAI's end with `data: [DONE]`, also after an error, which is then the event before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lora_serve.server.http.disconnect import unless_disconnected
from lora_serve.server.http.errors import common_shape, fault_of, note_fault, status_and_type
from lora_serve.server.http.json_response import encode

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events
}


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def named_event(body: msgspec.Struct) -> bytes:
    """An event under the name that its struct is tagged with."""
    name = str(type(body).__struct_config__.tag)
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(body))


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How one API's streams tell of an error, and how they end."""

    error: Callable[[BaseException], bytes]
    end: bytes


def _error_event(error: BaseException) -> bytes:
    return b"data: " + common_shape(fault_of(error), "") + b"\n\n"


OPENAI_FORM = StreamForm(_error_event, DONE)


class EventStream(Response):
    """Sends events as they come, and calls `close` at the end, however it comes."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        form: StreamForm = OPENAI_FORM,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]  # of the empty body that the base class knows
        self._events = events
        self._close = close
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(scope, send))
        except ClientDisconnect:
            pass  # there is no client left to answer
        finally:
            await self._close()

    async def _send(self, scope: Scope, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            note_fault(scope, status_and_type(error)[1])
            told = self._form.error(error)
            await send({"type": "http.response.body", "body": told, "more_body": True})
        await send({"type": "http.response.body", "body": self._form.end, "more_body": False})
