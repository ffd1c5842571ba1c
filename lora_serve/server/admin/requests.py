"""GET /v1/requests and /v1/caller: what is being answered, and who asks. No prompt, no answer."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.engine.frontend.requests_in_flight import RequestInFlight
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL
from lora_serve.server.admin.answers import CallerInfo, ListedRequest, RequestList
from lora_serve.server.admin.query import Query
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response

DEFAULT_LISTED = 100
MAX_LISTED = 1000


def requests_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/requests")
    async def list_requests(request: Request) -> Response:
        """An admin sees all; another sees what came with the same key, as it may abort that."""
        limit = Query(request, "limit").number("limit", MAX_LISTED, DEFAULT_LISTED)
        caller = caller_of(request)
        tenant = context.keys.tenant(caller)
        shows = "all" if caller.is_admin else "own key" if tenant else "none"

        def is_meant(asked: GenerateRequest) -> bool:
            return shows == "all" or (shows == "own key" and asked.tenant == tenant)

        listed, num_requests = await context.engine.list_requests(is_meant, limit)
        now = time.monotonic()
        return json_response(
            RequestList(
                data=[_listed(each, now) for each in listed],
                num_requests=num_requests,
                shows=shows,
            )
        )

    @router.get("/v1/caller")
    async def show_caller(request: Request) -> Response:
        caller, keys = caller_of(request), context.keys
        has_metrics = context.config.metrics_port is None
        return json_response(
            CallerInfo(
                name=caller.shown,
                may_change_server=caller.is_admin,
                may_read_metrics=has_metrics
                and (not keys.guards_metrics or keys.is_operator(caller)),
            )
        )

    return router


def _listed(each: RequestInFlight, now: float) -> ListedRequest:
    asked = each.request
    return ListedRequest(
        id=asked.client_request_id,
        route=asked.route,
        adapter=None if asked.lora_name is BASE_MODEL else asked.lora_name,
        state="running" if each.is_running else "waiting",
        age_seconds=round(max(0.0, now - each.arrival_time), 3),
        num_choices=asked.params.n,
        num_prompt_tokens=asked.prompt.num_tokens,
        num_computed_tokens=each.num_computed_tokens,
        num_cached_tokens=each.num_cached_tokens,
        num_output_tokens=each.num_output_tokens,
    )
