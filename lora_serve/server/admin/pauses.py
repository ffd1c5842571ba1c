"""Routes for trainers: /pause, /resume and /is_paused, with vLLM's words.

A pause loses no request: those that come wait, within the bounds of the queue. Adapters may be
loaded, replaced and unloaded meanwhile; each request ends with the version that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.messages import PauseMode
from lora_serve.server.admin.answers import IsPaused, Status
from lora_serve.server.admin.audit import CallAudit
from lora_serve.server.admin.protocol import PauseBody, ResumeBody
from lora_serve.server.admin.query import Query
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response

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

    return router
