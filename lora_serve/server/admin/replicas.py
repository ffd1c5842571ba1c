"""The servers that share a catalog."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.catalog.records import Standing
from lora_serve.server.admin.answers import Replica, ReplicaList, Status
from lora_serve.server.admin.audit import CallAudit
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response


def replicas_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    names = context.names

    @router.get("/v1/replicas")
    async def list_replicas(request: Request) -> Response:
        context.keys.require_admin(request, "this asks for servers' addresses")
        replicas = [_replica(standing) for standing in await names.standings()]
        return json_response(ReplicaList(data=replicas, this=names.replica_id))

    @router.delete("/v1/replicas/{replica_id:path}")
    async def forget_replica(request: Request, replica_id: str) -> Response:
        with CallAudit("replica forgotten", caller_of(request)) as audit:
            context.keys.require_admin(request)
            audit.note(replica=replica_id)
            await names.forget(replica_id)
        return json_response(Status("forgotten"))

    return router


def _replica(standing: Standing) -> Replica:
    member, report = standing.member, standing.report
    return Replica(
        id=member.replica_id,
        address=member.address,
        serial=report.serial,
        loading=len(report.loading),
        failed=len(report.failed),
        silent_seconds=standing.silent_seconds,
    )
