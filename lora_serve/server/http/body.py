"""Reads a request's JSON body, and refuses it in words that name the field and the fault.

Never holds more than --max-body-bytes of a body, nor waits for it longer than
--request-body-timeout. Knows no route.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from lora_serve.config import ServerConfig
from lora_serve.errors import InvalidRequestError
from lora_serve.server.http.errors import BodyTimeoutError, BodyTooLargeError

MAX_FAULTS = 1000
MAX_FAULTS_TOLD = 10
MAX_VALUE_CHARS = 80

BodyModel = TypeVar("BodyModel", bound=BaseModel)


async def read_body(
    request: Request, model: type[BodyModel], config: ServerConfig, *, optional: bool = False
) -> BodyModel:
    """The body as a `model`.

    optional: no body at all counts as {}.

    Raises:
        InvalidRequestError: not JSON, or not such JSON; every faulty field is named.
        BodyTooLargeError: as soon as it is known to be.
        BodyTimeoutError: it had not come in --request-body-timeout.
    """
    try:
        async with asyncio.timeout(config.request_body_timeout or None):
            data = await _read_bytes(request, config.max_body_bytes)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the request body had not come in {config.request_body_timeout:g} s; send it faster, "
            "or raise --request-body-timeout"
        ) from None
    if optional and not data:
        data = b"{}"
    else:
        _require_json(request)
    try:
        return model.model_validate_json(
            data, extra="ignore" if config.ignore_unknown_fields else "forbid"
        )
    except ValidationError as error:
        if error.error_count() > MAX_FAULTS:
            raise InvalidRequestError(f"the body has {error.error_count()} faults") from None
        raise _invalid(error.errors(include_url=False, include_context=False)) from None


async def _read_bytes(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > limit:
        raise _too_large(limit)
    chunks = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the request body is larger than {limit} bytes; send less, or raise --max-body-bytes"
    )


def _require_json(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequestError(
            "Unsupported Media Type: Only 'application/json' is allowed, "
            f"got {_shown(content_type)}; set the Content-Type header"
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
        elif part != "[key]":  # pydantic's mark of a fault in a dict's key, after the key itself
            path += f".{_cut(part)}" if path else _cut(part)
    return path


def _fault_text(fault: ErrorDetails) -> str:
    if fault["type"] == "json_invalid":
        return fault["msg"]
    if fault["type"] == "missing":
        return f"{_field(fault)}: this field is required"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    where = f"{_field(fault)}: " if fault["loc"] else "the body: "
    return f"{where}{message}, got {_shown(fault['input'])}"


def _shown(value: object) -> str:
    """A value as the client wrote it, cut to a length that fits a message."""
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        value = value[: MAX_VALUE_CHARS + 1]  # it may be megabytes
    return _cut(json.dumps(value, ensure_ascii=False, default=repr))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"
