"""Routes for those who run the server: its health, its metrics, its prefix cache."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve import __version__
from lora_serve.errors import InvalidRequestError
from lora_serve.identity import EVERYTHING, Everything
from lora_serve.observability.http import HTTPMetrics
from lora_serve.server.admin.protocol import ResetPrefixCacheBody
from lora_serve.server.admin.responses import Load, Success, Version
from lora_serve.server.context import ServerContext
from lora_serve.server.http.json_response import json_response
from lora_serve.server.http.probes import LIVE_PATHS, READY_PATHS


def operations_router(context: ServerContext, http_metrics: HTTPMetrics) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/ping")
    async def health() -> Response:
        context.drain.check()
        engine.check_health()
        return Response()

    async def is_running() -> Response:
        return Response()

    for paths, answer in ((READY_PATHS, health), (LIVE_PATHS, is_running)):
        for path in paths:
            router.add_api_route(path, answer, methods=["GET"])

    @router.get("/version")
    async def version() -> Response:
        return json_response(Version(__version__))

    @router.get("/load")
    async def load() -> Response:
        return json_response(Load(http_metrics.num_generating))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        context.keys.require_admin(request)
        body = await context.bodies.read(request, ResetPrefixCacheBody, optional=True)
        lora_name = body.lora_name or _lora_name_in_query(request)
        return json_response(Success(await engine.reset_prefix_cache(lora_name)))

    return router


def _lora_name_in_query(request: Request) -> str | Everything:
    unknown = sorted(set(request.query_params) - {"lora_name"})
    if unknown:
        raise InvalidRequestError(
            f"unknown query parameters {unknown[:5]}; only lora_name is known", unknown[0]
        )
    return request.query_params.get("lora_name") or EVERYTHING
