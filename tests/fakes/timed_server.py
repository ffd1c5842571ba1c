"""A completions server over sockets whose answers take a known time; it computes nothing.

First tokens take `first_seconds`, later ones `gap_seconds`; a prompt seen before is half cached.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@dataclass
class TimedServer:
    """texts: what a token says, by model, if not "ab".

    breaks_after: answers end, unfinished, after so many tokens. chunked: else until it closes.
    finishes_apart: the reason to finish comes in an event without a token. Tokens without text come
    in no event, unless token ids are asked for.
    """

    first_seconds: float = 0.02
    gap_seconds: float = 0.01
    tokens_per_event: int = 1
    chunked: bool = True
    finishes_apart: bool = False
    breaks_after: int | None = None
    models: tuple[str, ...] = ("base",)
    adapters: tuple[str, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    _answering: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            yield f"http://127.0.0.1:{port}"
        await asyncio.gather(*self._answering)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._answering.add(task)
        try:
            await self._answer(reader, writer)
        except ConnectionError:
            pass  # the client left
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._answering.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        body = await reader.readexactly(length)
        self.headers.append(head)
        if head.startswith(b"GET"):
            await self._list_models(writer)
        else:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            await self._complete(json.loads(body), writer)
            self.running -= 1

    async def _list_models(self, writer: asyncio.StreamWriter) -> None:
        models: list[dict[str, Any]] = [{"id": name} for name in self.models]
        models += [{"id": name, "parent": self.models[0]} for name in self.adapters]
        await self._whole(writer, "200 OK", {"object": "list", "data": models})

    async def _whole(self, writer: asyncio.StreamWriter, status: str, body: Any) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["model"] not in self.models + self.adapters:
            error = {"error": {"message": f"no model {body['model']}"}}
            return await self._whole(writer, "404 Not Found", error)
        seen = body["prompt"] in [earlier["prompt"] for earlier in self.bodies]
        self.bodies.append(body)
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n" * self.chunked + b"\r\n")
        await self._tokens(body, writer)
        if self.breaks_after is None:
            await self._end(body, writer, len(body["prompt"]) // 2 if seen else 0)
        return None

    async def _tokens(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        count, text = body["max_tokens"], self.texts.get(body["model"], "ab")
        ids = [1] * self.tokens_per_event if body.get("return_token_ids") else None
        last = count if self.breaks_after is None else self.breaks_after
        for start in range(0, last, self.tokens_per_event):
            await asyncio.sleep(self.gap_seconds if start else self.first_seconds)
            end = start + self.tokens_per_event >= count
            reason = "length" if end and not self.finishes_apart else None
            choice = {"text": text * self.tokens_per_event, "finish_reason": reason}
            if choice["text"] or reason or ids:
                choice["token_ids"] = ids
                await self._event(writer, {"choices": [choice], "usage": None})

    async def _end(self, body: dict[str, Any], writer: asyncio.StreamWriter, cached: int) -> None:
        if self.finishes_apart:
            await self._event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        usage = {
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await self._event(writer, {"choices": [], "usage": usage})
        await self._write(writer, b"data: [DONE]\n\n")
        if self.chunked:
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        await self._write(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)
        await writer.drain()
