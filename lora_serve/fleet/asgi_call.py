"""One request answered by an ASGI application in this process, as a stream of what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.types import ASGIApp, Message

from lora_serve.fleet.messages import AnswerHead, RequestHead, WholeAnswer

MAX_UNREAD = 64  # parts of an answer; the application waits for its reader beyond

Begin = Callable[[int, list[tuple[bytes, bytes]], Mapping[str, object]], AnswerHead]


async def answer_of(
    app: ASGIApp, head: RequestHead, body: bytes, begin: Begin
) -> AsyncGenerator[AnswerHead | bytes, None]:
    """The answer's head, then its body in parts as they come; those that wait are joined.

    Closing it early is what a client does that leaves: the application is told so, and ends as it
    would behind a connection. It is not cut off in what it does for others.

    Args:
        begin: makes the head of a status, headers and what the application noted in `state`.
    """
    call = _Call(app, head, body, begin)
    try:
        async for part in call.parts():
            yield part
    finally:
        call.leave()


async def whole_answer(app: ASGIApp, head: RequestHead, body: bytes, begin: Begin) -> WholeAnswer:
    """Answer as `answer_of` does, but with the whole answer at once."""
    parts = [part async for part in answer_of(app, head, body, begin)]
    answered = parts[0]
    assert isinstance(answered, AnswerHead), "an answer begins with its head"
    return WholeAnswer(answered, b"".join(part for part in parts if isinstance(part, bytes)))


class _Call:
    """The application at work on one request."""

    def __init__(self, app: ASGIApp, head: RequestHead, body: bytes, begin: Begin) -> None:
        self._begin = begin
        self._scope = head.scope()
        self._body: bytes | None = body  # None once it was read
        self._has_left = asyncio.Event()
        # None ends it, an exception too.
        self._sent: asyncio.Queue[AnswerHead | bytes | Exception | None] = asyncio.Queue(MAX_UNREAD)
        self._task = asyncio.create_task(self._run(app), name="call")

    async def parts(self) -> AsyncGenerator[AnswerHead | bytes, None]:
        """What is sent, with bytes that wait as one. Raises what the application raised."""
        chunks: list[bytes] = []
        while True:
            if chunks and self._sent.empty():
                yield b"".join(chunks)
                chunks = []
            part = await self._sent.get()
            if isinstance(part, bytes):
                chunks.append(part)
                continue
            if chunks:
                yield b"".join(chunks)
                chunks = []
            if part is None:
                return
            if isinstance(part, Exception):
                raise part
            yield part

    def leave(self) -> None:
        """Take nothing more. What waited to send goes on, to nowhere."""
        self._has_left.set()
        while not self._sent.empty():
            self._sent.get_nowait()

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        except Exception as error:
            await self._put(error)
        else:
            await self._put(None)

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers, state = message.get("headers", []), self._scope["state"]
            await self._put(self._begin(message["status"], headers, state))
        elif message.get("body"):
            await self._put(message["body"])

    async def _put(self, part: AnswerHead | bytes | Exception | None) -> None:
        if not self._has_left.is_set():
            await self._sent.put(part)
