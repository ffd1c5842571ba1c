"""Routes for trainers: /pause, /resume, /is_paused, /abort_requests, with vLLM's words.

A pause loses no request: those that come wait, within the bounds of the queue. Adapters may be
loaded, replaced and unloaded meanwhile; each request ends with the version that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import PauseMode
from lora_serve.server.admin.answers import Aborted, IsPaused, Status
from lora_serve.server.admin.audit import CallAudit
from lora_serve.server.admin.protocol import AbortAnyBody, PauseBody, ResumeBody
from lora_serve.server.admin.query import Query
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.inference.protocol import AbortRequestsBody
from lora_serve.server.openai.generation import AnswerPrefix

PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
# What a pause does with the requests that are being answered, for its line in the log.
NUMBERS: Mapping[PauseMode, str] = MappingProxyType(
    {"abort": "num_aborted", "wait": "num_waited_for", "keep": "num_held"}
)


def pauses_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/pause")
    async def pause(request: Request) -> Response:
        with CallAudit("pause", caller_of(request)) as audit:
            context.keys.require_admin(request)
            body = await context.bodies.read(request, PauseBody, optional=True)
            query = Query(request, "mode", "clear_cache")
            mode = query.one_of("mode", PAUSE_MODES, body.mode or "abort")
            clears = query.flag("clear_cache", default=bool(body.clear_cache))
            query.check_body("mode", body.mode)
            query.check_body("clear_cache", body.clear_cache)
            audit.note(mode=mode, clear_cache=clears)
            audit.note(**{NUMBERS[mode]: await engine.pause(mode)})
            if clears:
                await engine.reset_prefix_cache()
        return json_response(Status("paused"))

    @router.post("/resume")
    async def resume(request: Request) -> Response:
        with CallAudit("resume", caller_of(request)):
            context.keys.require_admin(request)
            await context.bodies.read(request, ResumeBody, optional=True)
            Query(request)
            await engine.resume()
        return json_response(Status("resumed"))

    @router.get("/is_paused")
    async def is_paused(request: Request) -> Response:
        return json_response(IsPaused(engine.is_paused))

    _route_aborts(router, context)
    return router


def _route_aborts(router: APIRouter, context: ServerContext) -> None:
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
