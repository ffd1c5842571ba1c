"""The door of a fleet: takes requests, has replicas answer them, and passes on what they say.

Answers nothing itself but what no replica can: bodies that are too large or too slow, and requests
that no replica takes. Everything else, keys too, is the replica's, so it is what one server does.
Knows no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lora_serve.config import EngineConfig, ServerConfig
from lora_serve.errors import (
    AdapterError,
    ChangeUnknownError,
    EngineDeadError,
    LoraServeError,
    UnauthorizedError,
)
from lora_serve.fleet import spread
from lora_serve.fleet.messages import AnswerHead, ReplicaLostError, RequestHead, WholeAnswer
from lora_serve.fleet.reading import RequestReader
from lora_serve.fleet.routing import RoutingRequest
from lora_serve.fleet.spread import Spread
from lora_serve.server.anthropic.errors import stream_form
from lora_serve.server.anthropic.messages import MESSAGES_PATH
from lora_serve.server.error_shapes import ERROR_SHAPES
from lora_serve.server.http.auth import KeyRing
from lora_serve.server.http.body import BodyLimit, BodyReader
from lora_serve.server.http.cors import CrossOrigin
from lora_serve.server.http.disconnect import unless_disconnected
from lora_serve.server.http.errors import ErrorBoundary, ErrorShapes, error_response
from lora_serve.server.http.hosts import AllowedHosts
from lora_serve.server.http.request_ids import HEADER, RequestIds
from lora_serve.server.http.root_path import RootPath
from lora_serve.server.http.streaming import OPENAI_FORM
from lora_serve.server.openai.models import ServedModels

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
TAKEN_SECONDS = 60.0  # in which some replica must take a request
ASKING_SECONDS = 25.0  # after which what a replica says is the answer; it may wait for an adapter

_REFUSED = "refused"  # in a request's state

Part = str | AnswerHead | bytes


class Fleet(Protocol):
    """The replicas, as Ray Serve or a test has them."""

    def answer(
        self, routing: RoutingRequest, head: RequestHead, body: bytes
    ) -> AsyncGenerator[Part, None]:
        """Have the replica that fits best answer.

        Returns:
            The id of the replica that has taken it, then the answer's head, then its body. Closing
            it aborts the request.

        Raises:
            ReplicaLostError: the replica is gone.
        """

    async def ask_all(self, head: RequestHead, body: bytes) -> list[WholeAnswer]:
        """Have every replica answer.

        Raises:
            ReplicaLostError: there is none.
        """


def ingress_app(
    fleet: Fleet,
    engine: EngineConfig,
    server: ServerConfig,
    keys: KeyRing | None = None,
    *,
    has_catalog: bool = False,
) -> ASGIApp:
    """The ASGI application of an ingress.

    Args:
        has_catalog: what changes adapters on one replica changes them on all. Without, none may.

    Raises:
        ConfigError: a key file cannot be read.
    """
    app: ASGIApp = Ingress(fleet, engine, server, keys or KeyRing(server), has_catalog)
    app = ErrorShapes(ErrorBoundary(app), ERROR_SHAPES)
    app = RequestIds(app)
    return RootPath(app, server.root_path) if server.root_path else app


class Ingress:
    """What passes requests on; `ingress_app` puts what it needs around it."""

    def __init__(
        self,
        fleet: Fleet,
        engine: EngineConfig,
        server: ServerConfig,
        keys: KeyRing,
        has_catalog: bool,
    ) -> None:
        self._fleet = fleet
        self._keys = keys
        self._has_catalog = has_catalog
        self._takes_embeds = engine.model.enable_prompt_embeds
        self._reader = RequestReader(ServedModels(engine))
        self._bodies = BodyReader(server)
        limit = BodyLimit(server.max_lora_body_bytes, "--max-lora-body-bytes")
        self._adapter_bodies = BodyReader(server, each=limit, total=limit)
        # A page may read the errors that are told here, if it may read those of replicas.
        self._refusal = CrossOrigin(_refuse, config=server, hosts=AllowedHosts(server))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        assert scope["type"] == "http", scope["type"]
        scope = {**scope, "path": scope["path"].removeprefix(scope.get("root_path", ""))}
        answer = _Answer(scope, send, self._refusal)
        try:
            tenant, body = await self._read(Request(scope, receive))
            work = self._answer(answer, _head_of(scope), body, tenant)
            await unless_disconnected(receive, work)
        except LoraServeError as error:
            await answer.fail(error)
        except ClientDisconnect:
            pass  # there is no client left to answer

    async def _read(self, request: Request) -> tuple[str, bytes]:
        """The tenant and the body of a request; no body where the replica will refuse its key."""
        try:
            caller = self._keys.identify(request.headers)
        except UnauthorizedError:
            return "", b""
        request.scope.setdefault("state", {})["caller"] = caller
        bodies = self._bodies
        if request.url.path in ADAPTER_BODY_PATHS:
            bodies = self._adapter_bodies
        return self._keys.tenant(caller), await bodies.receive(
            request, takes_embeds=self._takes_embeds
        )

    async def _answer(self, answer: _Answer, head: RequestHead, body: bytes, tenant: str) -> None:
        how = spread.spread_of(head.method, head.path, has_catalog=self._has_catalog)
        if how is Spread.REFUSED:
            raise AdapterError(
                "adapters of several replicas are changed through a catalog, and these have none; "
                "start them with lora_catalog"
            )
        if how is not Spread.ONE:
            await answer.send_whole(await self._ask_all(how, head, body))
            return
        read = self._reader.read(head.headers, body, tenant)
        routing = read.routing
        if read.previous_response:
            routing = replace(routing, only=await self._holder(read.previous_response, head))
        may_repeat = spread.may_repeat(head.method, head.path)
        latest = time.monotonic() + ASKING_SECONDS
        for is_last in (*([False] * (MAX_ATTEMPTS - 1) if may_repeat else []), True):
            is_late = time.monotonic() > latest
            failed = await self._attempt(answer, routing, head, body, is_last or is_late)
            if failed is None:
                return
            routing = replace(routing, excluded=routing.excluded | {failed}, only="")
        if not may_repeat:
            raise ChangeUnknownError(
                "the replica that had this request was lost; it may have done it: see /v1/models"
            )
        raise EngineDeadError(
            f"the replicas that had this request were lost, {MAX_ATTEMPTS} in a row; send it again"
        )

    async def _attempt(
        self,
        answer: _Answer,
        routing: RoutingRequest,
        head: RequestHead,
        body: bytes,
        is_last: bool,
    ) -> str | None:
        """Have one replica answer; returns which one has failed before anything was sent.

        is_last: what a replica says must be passed on, even that another one should be asked. It is
            so, too, if the replica has failed this request before: then there is no other.
        """
        replica_id = ""
        async with aclosing(self._fleet.answer(routing, head, body)) as parts:
            try:
                replica_id = await _taken(parts)
                async for part in parts:
                    if isinstance(part, AnswerHead):
                        is_last = is_last or replica_id in routing.excluded
                        if part.must_go_elsewhere and not is_last:
                            return replica_id
                        answer.begin(part)
                    else:
                        assert isinstance(part, bytes), part
                        await answer.send_part(part)
                await answer.end()
            except ReplicaLostError as error:
                if answer.has_ended:
                    return None
                if answer.has_sent:
                    logger.warning("replica %s was lost in an answer: %s", replica_id, error)
                    raise EngineDeadError("the replica was lost while it answered") from error
                logger.warning("replica %s was lost, another one is asked: %s", replica_id, error)
                return replica_id
        return None

    async def _ask_all(self, how: Spread, head: RequestHead, body: bytes) -> WholeAnswer:
        if how is Spread.PAGE:  # of which another form is not to be merged
            kept = tuple(each for each in head.headers if each[0].lower() != b"accept")
            head = replace(head, headers=kept)
        try:
            answers = await self._fleet.ask_all(head, body)
        except ReplicaLostError as error:
            raise EngineDeadError(f"no replica can answer: {error}") from error
        return _MERGES[how](answers)

    async def _holder(self, response_id: str, head: RequestHead) -> str:
        """The replica that has kept a response; "" if none has, as any of them will say."""
        path = f"{spread.RESPONSES_PREFIX}{response_id}"
        kept = tuple(e for e in head.headers if e[0].lower() not in _HEADERS_OF_BODIES)
        asked = replace(head, method="GET", path=path, query=b"", headers=kept)
        try:
            answers = await self._fleet.ask_all(asked, b"")
        except ReplicaLostError:
            return ""
        return next((a.head.replica_id for a in answers if a.head.status == 200), "")


_MERGES: dict[Spread, Callable[[Sequence[WholeAnswer]], WholeAnswer]] = {
    Spread.SUM: spread.summed,
    Spread.PAGE: spread.one_page,
    Spread.FINDER: spread.found,
}
_HEADERS_OF_BODIES = (b"content-length", b"content-type", b"transfer-encoding")
ADAPTER_BODY_PATHS = frozenset({"/load_lora_adapter_from_tensors"})


async def _taken(parts: AsyncGenerator[Part, None]) -> str:
    """The replica that has taken the request."""
    try:
        async with asyncio.timeout(TAKEN_SECONDS):
            taken = await anext(parts)
    except TimeoutError:
        raise EngineDeadError(
            f"no replica could take this request within {TAKEN_SECONDS:g} s; send it again later"
        ) from None
    assert isinstance(taken, str), taken
    return taken


@dataclass(slots=True)
class _Answer:
    """An answer to a client, which begins with the first byte of its body.

    Until then nothing was sent, so another replica may begin anew. refusal: answers instead, where
    none did.
    """

    scope: Scope
    send: Send
    refusal: ASGIApp
    head: AnswerHead | None = None
    has_sent: bool = False
    has_ended: bool = False
    num_sent: int = 0  # bytes of the body

    def begin(self, head: AnswerHead) -> None:
        self.head = head

    async def send_part(self, body: bytes) -> None:
        """Send a part of the body; the last one ends the answer, where its length is known.

        The client has it all then, and may send its next request on this connection: whatever
        becomes of the replica now must not close that.
        """
        await self._send_head()
        self.num_sent += len(body)
        self.has_ended = self.num_sent == self._length
        message = {"type": "http.response.body", "body": body, "more_body": not self.has_ended}
        await self.send(message)

    async def end(self) -> None:
        if self.has_ended:
            return
        await self._send_head()
        self.has_ended = True
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_whole(self, answer: WholeAnswer) -> None:
        self.begin(answer.head)
        if answer.body:
            await self.send_part(answer.body)
        await self.end()

    async def fail(self, error: LoraServeError) -> None:
        """Tell of an error: as an answer of its own, or as a stream's last event.

        An answer that is no stream and has begun is cut off.
        """
        if not self.has_sent:
            self.scope["state"][_REFUSED] = error
            await self.refusal(self.scope, _nothing, self.send)
            return
        if not self._is_stream:
            raise error
        form = OPENAI_FORM
        if self.scope["path"].startswith(MESSAGES_PATH):
            form = stream_form(self.scope["state"]["request_id"])
        await self.send_part(form.error(error) + form.end)
        await self.end()

    async def _send_head(self) -> None:
        if self.has_sent:
            return
        assert self.head is not None, "an answer begins with its head"
        self.has_sent = True
        start = {
            "type": "http.response.start",
            "status": self.head.status,
            "headers": [*self.head.headers],
        }
        await self.send(start)

    @property
    def _length(self) -> int | None:
        """How many bytes the body has; None if its head does not say."""
        assert self.head is not None, "it has begun"
        length = Headers(raw=[*self.head.headers]).get("content-length", "")
        return int(length) if length.isdecimal() else None

    @property
    def _is_stream(self) -> bool:
        assert self.head is not None, "it has begun"
        content_type = Headers(raw=[*self.head.headers]).get("content-type", "")
        return content_type.startswith("text/event-stream")


def _head_of(scope: Scope) -> RequestHead:
    """The head to pass on; a request without an id has one from here on."""
    headers = MutableHeaders(raw=[*scope["headers"]])
    headers.setdefault(HEADER, scope["state"]["request_id"])
    return RequestHead(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"],
        headers=tuple(headers.raw),
        client=scope.get("client"),
        scheme=scope["scheme"],
    )


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error that the scope holds."""
    await error_response(scope["state"][_REFUSED], scope)(scope, receive, send)


async def _nothing() -> dict[str, object]:
    raise AssertionError("an answer of its own reads nothing")


async def _live(receive: Receive, send: Send) -> None:
    """ASGI's lifespan, in which there is nothing to do."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
