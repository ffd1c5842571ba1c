"""Reads a request's JSON body, and refuses it in words that name the field and the fault.

Never holds more than --max-body-bytes of a body, nor waits for it longer than
--request-body-timeout, nor holds much more than --max-total-body-bytes of all of them, which API
keys share. Knows no route.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from lora_serve.config import ServerConfig
from lora_serve.errors import InvalidRequestError
from lora_serve.server.http.auth import share_of
from lora_serve.server.http.body_room import BodyRoom
from lora_serve.server.http.body_shares import IncomingBody
from lora_serve.server.http.errors import BodyTimeoutError, BodyTooLargeError
from lora_serve.server.http.fault_words import words_of
from lora_serve.server.http.json_shape import TALLY, JsonTally, check_shape, has_few_containers
from lora_serve.server.http.room import WAIT_SECONDS
from lora_serve.server.http.turns import ThreadByTurns

# Waits for no room, and is parsed where it is read unless it is made of many lists: in at most 2 ms
# (Zen 5; 4 on a busy Xeon). Floods of large bodies delay no small one.
SMALL_BODY_BYTES = 2**16
MAX_FAULTS = 1000
MAX_FAULTS_TOLD = 10
MAX_VALUE_CHARS = 80
EMBEDS_KEY = b'"prompt_embeds"'
# What pydantic puts into the path of a fault: of a union's choice, and of a dict's key behind it.
UNION_TAGS = ("[chat]", "[completion]", "[embedding]", "[pooling]", "[score]", "[rerank]")
MARKS = frozenset({*UNION_TAGS, "[key]"})
IGNORES_UNKNOWN = "ignores_unknown"  # in the context of a validation, for fields that hold others

BodyModel = TypeVar("BodyModel", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """Most bytes, as a flag says."""

    num_bytes: int
    flag: str


class BodyReader:
    """Reads and parses the bodies of all requests, or of those of a kind."""

    def __init__(
        self,
        config: ServerConfig,
        wait_seconds: float = WAIT_SECONDS,
        *,
        each: BodyLimit | None = None,
        total: BodyLimit | None = None,
    ) -> None:
        """wait_seconds: for others' bodies to make room.

        each, total: of one body and of all at once, if not the limits of most routes.
        """
        self._config = config
        self._each = each or BodyLimit(config.max_body_bytes, "--max-body-bytes")
        total = total or BodyLimit(config.max_total_body_bytes, "--max-total-body-bytes")
        self._room = BodyRoom(total.num_bytes, total.flag, wait_seconds)
        # One, because parsers let no other thread run: of several each would wait for all others,
        # and so would the event loop.
        self._parser = ThreadByTurns("body-parser")

    async def read(
        self,
        request: Request,
        model: type[BodyModel],
        *,
        optional: bool = False,
        takes_embeds: bool = False,
    ) -> BodyModel:
        """The body as a `model`.

        Args:
            optional: no body at all counts as {}.
            takes_embeds: with prompt_embeds the body may have --max-embeds-body-bytes.

        Raises:
            InvalidRequestError: not JSON, or not such JSON; every faulty field is named.
            BodyTooLargeError: as soon as it is known to be.
            BodyTimeoutError: it had not come in --request-body-timeout, or gave way to others.
            OverloadedError: others have --max-total-body-bytes already.
        """
        share = share_of(request)
        with self._room.hold(share) as body:
            data = await self._receive_in_time(request, takes_embeds, body)
            if optional and not data:
                data = b"{}"
            else:
                _require_json(request)
            return await self._parsed(share, data, model)

    async def receive(self, request: Request, *, takes_embeds: bool = False) -> bytes:
        """The body as it came, for one that is read elsewhere.

        Raises what `read` raises before it looks into a body.
        """
        with self._room.hold(share_of(request)) as body:
            return await self._receive_in_time(request, takes_embeds, body)

    @asynccontextmanager
    async def held(self, request: Request, model: type[BodyModel]) -> AsyncIterator[BodyModel]:
        """Read as `read` does; the body keeps its room within, for work on it."""
        share = share_of(request)
        with self._room.hold(share) as body:
            data = await self._receive_in_time(request, False, body)
            _require_json(request)
            parsed = await self._parsed(share, data, model)
            del data
            yield parsed

    async def _parsed(self, share: str, data: bytes, model: type[BodyModel]) -> BodyModel:
        if len(data) <= SMALL_BODY_BYTES and has_few_containers(data):
            return self._parse(data, model)
        return await self._parser.run(share, partial(self._parse_large, data, model))

    async def _receive_in_time(
        self, request: Request, takes_embeds: bool, body: IncomingBody
    ) -> bytes:
        seconds = self._config.request_body_timeout
        try:
            async with asyncio.timeout(seconds or None) as clock:
                with self._room.receive(body, clock):
                    return await self._receive(request, takes_embeds, body)
        except TimeoutError:
            raise BodyTimeoutError(
                f"{body.amount} bytes of the request body had come when others needed the room "
                f"that it took of {self._room.limit}; send it faster, or raise {self._room.flag}"
                if body.gave_way
                else f"the request body had not come in {seconds:g} s; send it faster, or raise "
                "--request-body-timeout"
            ) from None

    async def _receive(self, request: Request, takes_embeds: bool, body: IncomingBody) -> bytes:
        limit = plain_limit = self._each.num_bytes
        if takes_embeds:
            limit = max(limit, self._config.max_embeds_body_bytes)
        flag = "--max-embeds-body-bytes" if limit > plain_limit else self._each.flag
        declared = _declared_bytes(request)
        if declared is not None and declared > limit:
            raise _too_large(f"it has {declared}", limit, flag)
        chunks = []
        num_bytes = 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise _too_large(f"{num_bytes} have come", limit, flag)
            if num_bytes > SMALL_BODY_BYTES:
                await self._room.add_in_turn(body, len(chunk))
            else:
                self._room.add(body, len(chunk))
            chunks.append(chunk)
        # To copy tens of megabytes would hold the event loop.
        is_small = num_bytes <= SMALL_BODY_BYTES
        data = b"".join(chunks) if is_small else await asyncio.to_thread(b"".join, chunks)
        if num_bytes > plain_limit and EMBEDS_KEY not in data:
            raise _too_large(
                f"it has {num_bytes}, and no prompt_embeds", plain_limit, "--max-body-bytes"
            )
        return data

    def _parse_large(self, data: bytes, model: type[BodyModel]) -> BodyModel:
        check_shape(data)
        return self._parse(data, model)

    def _parse(self, data: bytes, model: type[BodyModel]) -> BodyModel:
        ignores = self._config.ignore_unknown_fields
        try:
            return _validated(data, model, ignores=ignores, drops=ignores)
        except ValidationError as error:
            faults = _faults(error)
        if not faults:
            try:
                return _validated(data, model, ignores=False, drops=True)
            except ValidationError as error:
                faults = _faults(error)
        raise _invalid(faults)


def _validated(data: bytes, model: type[BodyModel], *, ignores: bool, drops: bool) -> BodyModel:
    """ignores: whether parts of fields may hold unknown ones. drops: unknown fields, or refuse."""
    return model.model_validate_json(
        data,
        extra="ignore" if drops else "forbid",
        context={IGNORES_UNKNOWN: ignores, TALLY: JsonTally()},
    )


def _faults(error: ValidationError) -> list[ErrorDetails]:
    """What is wrong; no unknown fields that are null, as some clients write all that they know."""
    if error.error_count() > MAX_FAULTS:
        raise InvalidRequestError(f"the body has {error.error_count()} faults") from None
    faults = error.errors(include_url=False)
    return [f for f in faults if f["type"] != "extra_forbidden" or f["input"] is not None]


def _declared_bytes(request: Request) -> int | None:
    declared = request.headers.get("content-length", "")
    is_number = declared.isascii() and declared.isdigit() and len(declared) < 20
    return int(declared) if is_number else None


def _too_large(found: str, limit: int, flag: str) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the request body is larger than {limit} bytes ({found}); send less, or raise {flag}"
    )


def _require_json(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequestError(
            "Unsupported Media Type: Only 'application/json' is allowed, "
            f"got {shown_value(content_type)}; set the Content-Type header"
        )


def _invalid(faults: Sequence[ErrorDetails]) -> InvalidRequestError:
    unknown = [_field(fault) for fault in faults if fault["type"] == "extra_forbidden"]
    others = [fault for fault in faults if fault["type"] != "extra_forbidden"]
    texts = [_fault_text(fault) for fault in _told(others)]
    if unknown:
        names = ", ".join(f"`{name}`" for name in _told(unknown))
        noun = "field" if len(unknown) == 1 else "fields"
        texts.append(
            f"unknown {noun} {names}; leave out what this server does not know, or start it "
            "with --ignore-unknown-fields"
        )
    num_untold = sum(max(0, len(kind) - MAX_FAULTS_TOLD) for kind in (unknown, others))
    if num_untold:
        texts.append(f"and {num_untold} more")
    return InvalidRequestError("; ".join(texts), _field(faults[0]) or None)


T = TypeVar("T")


def _told(faults: Sequence[T]) -> Sequence[T]:
    return faults[:MAX_FAULTS_TOLD]


def _field(fault: ErrorDetails) -> str:
    """The path of a fault, as in `messages[0].content`."""
    path = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in MARKS:
            path += f".{_cut(part)}" if path else _cut(part)
    return path


def _fault_text(fault: ErrorDetails) -> str:
    if fault["type"] == "json_invalid":
        return fault["msg"]
    text = f"{_field(fault) or 'the body'}: {words_of(fault)}"
    return text if fault["type"] == "missing" else f"{text}, got {shown_value(fault['input'])}"


def shown_value(value: object) -> str:
    """A value as the client wrote it, cut to a length that fits a message."""
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return _cut(_beginning(value))
    if isinstance(value, str):
        value = value[: MAX_VALUE_CHARS + 1]  # it may be megabytes
    return _cut(json.dumps(value, ensure_ascii=False, default=repr))


def _beginning(value: dict[str, object]) -> str:
    """Write it as JSON, hardly more of it than is shown."""
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
        text += piece[: MAX_VALUE_CHARS + 1]
        if len(text) > MAX_VALUE_CHARS:
            break
    return text


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"
