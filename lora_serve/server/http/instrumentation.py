"""Middleware that counts requests and tells of generations. Changes nothing of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_serve.observability.http import HTTPMetrics
from lora_serve.server.http.access_log import AccessLog
from lora_serve.server.http.errors import FAULT_KEY
from lora_serve.server.http.request_record import STATE_KEY, RecordedSpan, RequestRecord

CLIENT_LEFT = 499  # nginx's status for a request whose client has left


class Instrumentation:
    """Outside of all other middleware, so that it sees the status that is sent.

    generating_paths: those whose requests count as generations, and are logged. begin_span: makes
    such a request's span.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HTTPMetrics,
        access_log: AccessLog,
        generating_paths: frozenset[str],
        begin_span: Callable[[Scope], RecordedSpan] | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._generating_paths = generating_paths
        self._begin_span = begin_span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT
        record = self._begun(scope)

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if record is not None and record.span is not None:
                    told = (b"traceresponse", record.span.traceresponse.encode())
                    message = {**message, "headers": [*message["headers"], told]}
            await send(message)

        started = time.monotonic()
        self._metrics.num_generating += record is not None
        try:
            await self._app(scope, receive, noting_send)
        finally:
            self._metrics.num_generating -= record is not None
            seconds = time.monotonic() - started
            self._metrics.observe(route_of(scope), scope["method"], status, seconds)
            if record is not None:
                record.error = scope["state"].get(FAULT_KEY, record.error)
                record.answered(partial(self._tell, record, scope, status))

    def _begun(self, scope: Scope) -> RequestRecord | None:
        """The record of a request that generates."""
        if scope["path"] not in self._generating_paths:
            return None
        record = self._access_log.new_record()
        scope.setdefault("state", {})[STATE_KEY] = record
        if self._begin_span is not None:
            record.span = self._begin_span(scope)
        return record

    def _tell(self, record: RequestRecord, scope: Scope, status: int) -> None:
        if record.span is not None:
            record.span.end(record, scope["path"], status)
        self._access_log.tell(record, scope, status)


def route_of(scope: Scope) -> str | None:
    """The path of a request's route as the table has it; None until it has been found."""
    route: str | None = getattr(scope.get("route"), "path", None)
    return route
