"""Turns errors into HTTP: one table of statuses, on every route.

The body is OpenAI's: {"error": {"message", "type", "param", "code"}}, unless `ErrorShapes` has
another for the path. What is not in the tree of lora_serve/errors.py is a bug: it is logged with
its traceback and not shown to the caller.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterUnavailableError,
    CatalogUnavailableError,
    ChangeUnknownError,
    EngineDeadError,
    ForbiddenError,
    GrammarUnavailableError,
    InvalidRequestError,
    KVLoadError,
    LoraServeError,
    NotForgottenError,
    NotFoundError,
    OverloadedError,
    PauseEndedError,
    RequestAbortedError,
    RequestFailedError,
    SlowReaderError,
    UnauthorizedError,
)

logger = logging.getLogger(__name__)


class BodyTooLargeError(InvalidRequestError):
    """A request body above --max-body-bytes."""


class BodyTimeoutError(InvalidRequestError):
    """A request body that was not sent in --request-body-timeout."""


class HeadTimeoutError(InvalidRequestError):
    """A request's head that was not sent in --request-head-timeout."""


class HeadTooLargeError(InvalidRequestError):
    """A request's head that is longer than any client needs."""


class TooManyConnectionsError(OverloadedError):
    """More than --max-connections, all of them in use."""


INTERNAL = (500, "InternalServerError")

# A class that is not named here is answered like the nearest of its bases that is.
STATUS_AND_TYPE: dict[type[BaseException], tuple[int, str]] = {
    InvalidRequestError: (400, "BadRequestError"),
    BodyTooLargeError: (413, "RequestTooLargeError"),
    BodyTimeoutError: (408, "RequestTimeoutError"),
    HeadTimeoutError: (408, "RequestTimeoutError"),
    HeadTooLargeError: (431, "RequestHeaderFieldsTooLargeError"),
    NotFoundError: (404, "NotFoundError"),
    AdapterError: (400, "InvalidUserInput"),
    AdapterUnavailableError: (503, "ServiceUnavailableError"),
    CatalogUnavailableError: (503, "ServiceUnavailableError"),
    ChangeUnknownError: (503, "ChangeUnknownError"),
    UnauthorizedError: (401, "UnauthorizedError"),
    ForbiddenError: (403, "ForbiddenError"),
    OverloadedError: (503, "ServiceUnavailableError"),
    EngineDeadError: (503, "ServiceUnavailableError"),
    GrammarUnavailableError: (503, "ServiceUnavailableError"),
    KVLoadError: (503, "ServiceUnavailableError"),
    PauseEndedError: (409, "ConflictError"),
    RequestAbortedError: (503, "RequestAbortedError"),
    NotForgottenError: (503, "ServiceUnavailableError"),
    RequestFailedError: INTERNAL,
    SlowReaderError: (408, "RequestTimeoutError"),
}

WORTH_RETRYING = (
    AdapterUnavailableError,
    CatalogUnavailableError,
    EngineDeadError,
    GrammarUnavailableError,
)
# This server cannot answer; one that has the adapter, or a living engine, may.
OF_THIS_SERVER = (
    AdapterChangedError,
    AdapterUnavailableError,
    CatalogUnavailableError,
    EngineDeadError,
)
FAULT_KEY = "fault"  # in a request's state
OF_THIS_SERVER_KEY = "of_this_server"
HTTP_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError"}


def status_and_type(error: BaseException) -> tuple[int, str]:
    for kind in type(error).__mro__:
        if kind in STATUS_AND_TYPE:
            return STATUS_AND_TYPE[kind]
    return INTERNAL


@dataclass(frozen=True, slots=True)
class Fault:
    """What is told of an error. kind: as the table names it. param: the field at fault."""

    message: str
    kind: str
    param: str | None
    status: int


class ErrorShape(Protocol):
    """How one API writes the body of an error."""

    def __call__(self, fault: Fault, request_id: str) -> bytes: ...


def error_detail(fault: Fault) -> dict[str, str | int | None]:
    """The fields of an error as OpenAI names them."""
    return {
        "message": fault.message,
        "type": fault.kind,
        "param": fault.param,
        "code": fault.status,
    }


def common_shape(fault: Fault, request_id: str) -> bytes:
    """OpenAI's, which has no place for the id."""
    detail = error_detail(fault)
    return json.dumps({"error": detail}).encode()  # ASCII, so lone surrogates of a path pass too


class ErrorShapes:
    """Middleware, outside of all that refuses: errors under a path are written in its API's shape.

    shapes: by path; it holds for what lies below, too.
    """

    def __init__(self, app: ASGIApp, shapes: Mapping[str, ErrorShape]) -> None:
        self._app = app
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for path, shape in self._shapes.items():
                if f"{scope['path']}/".startswith(f"{path}/"):
                    scope.setdefault("state", {})["error_shape"] = shape
        await self._app(scope, receive, send)


def fault_of(error: BaseException) -> Fault:
    """What is told of `error`; an unexpected one is logged here and stays anonymous."""
    status, kind = status_and_type(error)
    if not isinstance(error, LoraServeError):
        logger.error("unexpected %s", type(error).__name__, exc_info=error)
        message = "the server failed to answer this request; its log says why"
    else:
        message = str(error)
    return Fault(message, kind, getattr(error, "param", None), status)


def error_response(error: BaseException, scope: Scope | None = None) -> Response:
    """The answer to a request that failed. scope: None where there is not yet a request."""
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_seconds)
    elif isinstance(error, WORTH_RETRYING):
        headers["Retry-After"] = "1"
    elif isinstance(error, BodyTimeoutError):
        headers["Connection"] = "close"  # what follows would look like a new request
    elif isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    if scope is not None and isinstance(error, OF_THIS_SERVER):
        scope.setdefault("state", {})[OF_THIS_SERVER_KEY] = True
    return _response(fault_of(error), scope, headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer what `add_exception_handler(LoraServeError, …)` hands over."""
    assert isinstance(error, LoraServeError), f"{error!r} has its own handler"
    return error_response(error, request.scope)


NOTHING: Mapping[str, str] = MappingProxyType({})


async def answer_http_error(
    request: Request,
    error: Exception,
    paths: frozenset[str] = frozenset(),
    reasons: Mapping[str, str] = NOTHING,
) -> Response:
    """Routing's own errors: no such route, or not with this method; OPTIONS asks for its methods.

    paths: those that there are, one of which the client may have meant.
    reasons: why paths that a client may expect are not there, to follow their names.
    """
    assert isinstance(error, HTTPException), f"{error!r} has its own handler"
    message = error.detail
    headers = dict(error.headers or {})
    if error.status_code == 404:
        message = f"there is no route {request.url.path}{_meant(request.url.path, paths, reasons)}"
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))  # it comes of a set
        if request.method == "OPTIONS":  # of no page's preflight, which CrossOrigin answers
            return Response(status_code=204, headers=headers)
        message = f"{request.method} is not allowed on {request.url.path}; use {headers['Allow']}"
    kind = HTTP_TYPES.get(error.status_code, "BadRequestError")
    return _response(Fault(message, kind, None, error.status_code), request.scope, headers)


def _meant(path: str, paths: frozenset[str], reasons: Mapping[str, str]) -> str:
    """A hint for clients whose base URL has /v1 not at all, or twice, or that add a slash."""
    if path in reasons:
        return reasons[path]
    if path.rstrip("/") == "/v1":
        return ": it is a base URL, behind which clients put a route, as in /v1/models"
    single = f"/{path.strip('/')}"
    if single in paths and single != path:  # a path may be known, and switched off here
        place = "beginning" if path.startswith("//") else "end"
        return f"; there is {single}: leave out the slash at the {place}"
    for near in (f"/v1{single}", single.removeprefix("/v1")):
        if near in paths and near != path:
            return f"; there is {near}: set the client's base URL to end in /v1, without a slash"
    return ""


class ErrorBoundary:
    """Outermost middleware: a bug becomes a 500 in the common shape, or ends a started answer.

    A client that left while it was still sending gets no answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noticing_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noticing_send)
        except ClientDisconnect:
            logger.debug("the client left %s before its request was read", scope["path"])
        except Exception as error:
            response = error_response(error, scope)  # logs it
            if not has_started:
                await response(scope, receive, send)


def note_fault(scope: Scope, kind: str) -> None:
    """Note of what kind the error is that the client is told."""
    scope.setdefault("state", {})[FAULT_KEY] = kind


def _response(fault: Fault, scope: Scope | None, headers: dict[str, str]) -> Response:
    state = {} if scope is None else scope.get("state", {})
    if scope is not None:
        note_fault(scope, fault.kind)
    shape: ErrorShape = state.get("error_shape", common_shape)
    body = shape(fault, state.get("request_id", ""))
    return Response(body, fault.status, headers, media_type="application/json")
