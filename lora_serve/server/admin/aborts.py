"""Routes that end requests: /abort_requests for admins, and the same for a caller's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.generate_request import GenerateRequest
from lora_serve.server.admin.answers import Aborted
from lora_serve.server.admin.audit import CallAudit
from lora_serve.server.admin.protocol import AbortAnyBody, AbortRequestsBody
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.openai.generation import AnswerPrefix


def aborts_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/abort_requests")
    async def abort_any(request: Request) -> Response:
        with CallAudit("abort", caller_of(request)) as audit:
            context.keys.require_admin(request)
            body = await context.bodies.read(request, AbortAnyBody, optional=True)
            ids = body.request_ids
            _note_named(audit, ids)
            num = await engine.abort_requests((lambda _: True) if ids is None else known_as(ids))
            audit.note(num_aborted=num)
        return json_response(Aborted(num))

    @router.post("/inference/v1/abort_requests")
    async def abort_own(request: Request) -> Response:
        """A caller ends requests that came with the same key; an admin ends any."""
        body = await context.bodies.read(request, AbortRequestsBody)
        caller = caller_of(request)
        tenant, is_named = context.keys.tenant(caller), known_as(body.request_ids)

        def is_meant(asked: GenerateRequest) -> bool:
            return is_named(asked) and (caller.is_admin or asked.tenant == tenant)

        num = await engine.abort_requests(is_meant)
        if caller.is_admin:  # it may have ended others' requests
            with CallAudit("abort", caller) as audit:
                _note_named(audit, body.request_ids)
                audit.note(num_aborted=num)
        return json_response(Aborted(num))

    return router


def _note_named(audit: CallAudit, ids: Sequence[str] | None) -> None:
    if ids is None:
        audit.note(num_named="all")
    else:
        audit.note(num_named=len(ids), request_ids=tuple(ids))


def known_as(request_ids: Sequence[str]) -> Callable[[GenerateRequest], bool]:
    """Whether a request has one of these ids: as its client chose it, or as its answer shows it."""
    ids = set(request_ids)
    for prefix in AnswerPrefix:
        ids |= {name.removeprefix(prefix) for name in request_ids}
    return lambda asked: asked.client_request_id in ids
