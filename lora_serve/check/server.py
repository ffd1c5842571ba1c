"""Speaks HTTP with a server that is not trusted, and keeps what was said.

Every call ends: by an answer that could be read, or by an error that says why it could not.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import httpx

from lora_serve.check.answers import Answer, MalformedAnswerError
from lora_serve.check.findings import Exchange, JsonObject
from lora_serve.server_url import base_url, without_password

COMPLETIONS = "/v1/completions"
MAX_ANSWER_BYTES = 32 * 2**20
MAX_EXCHANGES = 2000  # of one probe
MAX_REPLY_CHARS = 2000
MAX_CONNECTIONS = 128
BUSY = 429
BUSY_SECONDS = (0.5, 1.0, 2.0, 4.0)  # between tries of what a busy server refused


class ServerFaultError(Exception):
    """A call that failed. status: the server's, or 0 if no answer could be read."""

    def __init__(self, what: str, status: int = 0) -> None:
        super().__init__(what)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a server is and how it is reached.

    api_key, admin_api_key: sent as bearer tokens; the latter with calls that change the server.
    verify: how its certificate is checked. timeout_seconds: of one call.
    """

    url: str
    api_key: str = ""
    admin_api_key: str = ""
    verify: ssl.SSLContext | bool = True
    timeout_seconds: float = 120.0

    @property
    def base_url(self) -> str:
        """The URL that routes are added to: without /v1, which they bring."""
        return base_url(self.url)


class Server:
    """A server, and the exchanges with it since `exchanges` was last cleared."""

    def __init__(self, target: Target) -> None:
        self.exchanges: list[Exchange] = []
        self._target = target
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=target.base_url,
            verify=target.verify,
            timeout=httpx.Timeout(target.timeout_seconds),
            limits=limits,
            follow_redirects=True,
            event_hooks={"response": [self._stay]},
            # Not compressed: a small answer could become one of any size.
            headers={"Accept-Encoding": "identity"},
            trust_env=False,  # a proxy's cache would be probed along with the server's
        )

    @property
    def url(self) -> str:
        return self._target.base_url

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def complete(self, body: JsonObject) -> Answer:
        """The answer to a body. Raises ServerFaultError; a busy server is asked again."""
        for seconds in (*BUSY_SECONDS, None):
            try:
                status, document = await self.call("POST", COMPLETIONS, body)
                answer = Answer()
                answer.add(document)
                return answer
            except MalformedAnswerError as error:
                raise ServerFaultError(str(error), status) from error
            except ServerFaultError as error:
                if error.status != BUSY or seconds is None:
                    raise
                await asyncio.sleep(seconds)
        raise AssertionError("the last try raised or returned")

    def stream(self, body: JsonObject) -> Stream:
        """A completion that arrives in the background."""
        return Stream(self, body)

    async def call(
        self, method: str, path: str, body: JsonObject | None = None, *, is_admin: bool = False
    ) -> tuple[int, Any]:
        """Status and JSON of an answer below 400; a body that is no JSON counts as a text.

        Raises:
            ServerFaultError: the call was refused, or nothing that can be read came back.
        """
        async with self._answering(method, path, body, is_admin=is_admin) as response:
            data = await _whole(response)
            self._keep(method, path, body, response.status_code, data)
        text = data.decode("utf-8", "replace")
        if response.status_code >= 400:
            raise ServerFaultError(
                f"{method} {path}: HTTP {response.status_code}: {_message(text)}",
                response.status_code,
            )
        return response.status_code, _json(text)

    async def status_of(self, method: str, path: str, body: JsonObject | None = None) -> int:
        """The status of a call of which only that matters; 0 if no answer came."""
        try:
            return (await self.call(method, path, body, is_admin=True))[0]
        except ServerFaultError as error:
            return error.status

    @asynccontextmanager
    async def _answering(
        self, method: str, path: str, body: JsonObject | None, *, is_admin: bool = False
    ) -> AsyncIterator[httpx.Response]:
        """The head of an answer, while its body arrives. Any fault is a ServerFaultError."""
        seconds = self._target.timeout_seconds
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream(method, path, json=body, headers=self._headers(is_admin)) as got,
            ):
                yield got
        except TimeoutError as error:
            self._keep(method, path, body, 0, b"")
            what = f"{method} {path}: no whole answer in {seconds:g} s (--timeout)"
            raise ServerFaultError(what) from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError) as error:
            self._keep(method, path, body, 0, b"")
            why = str(error) or type(error).__name__
            raise ServerFaultError(f"{method} {path}: {why}") from error

    async def _stay(self, response: httpx.Response) -> None:
        """Raise httpx.RequestError for a redirect to another server: it was not named."""
        if response.has_redirect_location:
            place = response.url.join(response.headers["Location"])
            if _origin(place) != _origin(response.url):
                raise httpx.RequestError(
                    f"redirects to {str(place)[:MAX_REPLY_CHARS]}; if that is the server, name it"
                )

    def _headers(self, is_admin: bool) -> Mapping[str, str]:
        target = self._target
        key = (target.admin_api_key or target.api_key) if is_admin else target.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _keep(
        self, method: str, path: str, body: JsonObject | None, status: int, data: bytes
    ) -> None:
        if len(self.exchanges) < MAX_EXCHANGES:
            reply = data[:MAX_REPLY_CHARS].decode("utf-8", "replace")
            self.exchanges.append(Exchange(method, path, body or {}, status, reply))


class Stream:
    """One streamed completion. `answer` grows while it arrives; `error` says how it broke off."""

    def __init__(self, server: Server, body: JsonObject) -> None:
        self.answer = Answer()
        self.error = ""
        self.is_whole = False
        self._server = server
        self._body = {**body, "stream": True}
        self._arrived = asyncio.Condition()
        self._task = asyncio.create_task(self._run())

    async def until(self, num_pieces: int) -> None:
        """Wait until so many pieces have arrived, or the end has."""
        async with self._arrived:
            await self._arrived.wait_for(
                lambda: self.answer.num_pieces >= num_pieces or self.has_ended
            )

    @property
    def has_ended(self) -> bool:
        return self.is_whole or bool(self.error)

    async def end(self) -> Answer:
        """What arrived, when nothing more will."""
        await self._task
        return self.answer

    async def leave(self) -> None:
        """Hang up."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        status, error = 0, ""
        try:
            async with self._server._answering("POST", COMPLETIONS, self._body) as response:
                status = response.status_code
                if status >= 400:
                    text = (await _whole(response)).decode("utf-8", "replace")
                    error = f"HTTP {status}: {_message(text)}"
                else:
                    await self._read(response)
                    error = "" if self.is_whole else "the stream ended without [DONE]"
        except (ServerFaultError, MalformedAnswerError) as fault:
            error = str(fault)
        finally:
            self._server._keep("POST", COMPLETIONS, self._body, status, self.answer.text.encode())
        self.error = error
        async with self._arrived:
            self._arrived.notify_all()

    async def _read(self, response: httpx.Response) -> None:
        async for data in _events(response):
            if data == "[DONE]":
                self.is_whole = True
                return
            self.answer.add(_json(data))
            async with self._arrived:
                self._arrived.notify_all()


async def _whole(response: httpx.Response) -> bytes:
    pieces, size = [], 0
    async for piece in response.aiter_raw():
        pieces.append(piece)
        size += len(piece)
        _refuse_above(size)
    return b"".join(pieces)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of each server-sent event; those of completions have one line each."""
    rest, size = b"", 0
    async for piece in response.aiter_raw():
        size += len(piece)
        _refuse_above(size)
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].decode("utf-8", "replace").strip()


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _refuse_above(size: int) -> None:
    if size > MAX_ANSWER_BYTES:
        raise ServerFaultError(f"the answer is larger than {MAX_ANSWER_BYTES:,} bytes")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _message(text: str) -> str:
    """The message of an error in OpenAI's shape, or the beginning of whatever it is."""
    document = _json(text)
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    detail = document.get("detail") if isinstance(document, dict) else None
    return str(message or detail or text)[:MAX_REPLY_CHARS]


def without_keys(target: Target) -> Target:
    """The target as reports may show it."""
    return replace(target, api_key="", admin_api_key="", url=without_password(target.url))
