"""Routes for those who run the server: its health, its metrics, its prefix cache."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve import __version__
from lora_serve.identity import EVERYTHING
from lora_serve.observability.http import HTTPMetrics
from lora_serve.server.admin.answers import Load, Success, Version, Welcome
from lora_serve.server.admin.audit import CallAudit
from lora_serve.server.admin.protocol import ResetPrefixCacheBody
from lora_serve.server.admin.query import Query
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.http.probes import LIVE_PATHS, READY_PATHS
from lora_serve.server.ui.files import UI_PATH

# What vLLM's clients may ask a reset for besides; here it is done whether they do or not.
ALWAYS_RESET = ("reset_running_requests", "reset_external")


def operations_router(context: ServerContext, http_metrics: HTTPMetrics) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/ping")
    async def health() -> Response:
        context.drain.check()
        engine.check_health()
        context.names.check_ready()
        return Response()

    async def is_running() -> Response:
        return Response()

    for paths, answer in ((READY_PATHS, health), (LIVE_PATHS, is_running)):
        for path in paths:
            router.add_api_route(path, answer, methods=["GET"])

    @router.get("/")
    async def welcome() -> Response:
        prefix = context.config.root_path
        return json_response(
            Welcome(
                name="lora-serve",
                version=__version__,
                models=f"{prefix}/v1/models",
                health=f"{prefix}/health",
                docs=None if context.config.disable_fastapi_docs else f"{prefix}/docs",
                ui=None if context.config.disable_ui else f"{prefix}{UI_PATH}",
            )
        )

    @router.get("/version")
    async def version() -> Response:
        return json_response(Version(__version__))

    @router.get("/load")
    async def load() -> Response:
        return json_response(Load(http_metrics.num_generating + context.responses.num_running))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        caller = caller_of(request)
        with CallAudit("cache reset", caller) as audit:
            context.keys.require_admin(request)
            body = await context.bodies.read(request, ResetPrefixCacheBody, optional=True)
            query = Query(request, "lora_name", *ALWAYS_RESET)
            for name in ALWAYS_RESET:
                query.flag(name, default=True)
            query.check_body("lora_name", body.lora_name)
            lora_name = body.lora_name or query.text("lora_name")
            audit.note(lora_name=lora_name or "all")
            is_whole = await context.names.reset(lora_name or EVERYTHING, caller.shown)
        return json_response(Success(is_whole))

    return router
