"""The servers that share a catalog, and how far changes of adapters have come among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.catalog.records import Record, Standing
from lora_serve.catalog.rollout import Rollout
from lora_serve.errors import CatalogUnavailableError
from lora_serve.server.admin.answers import (
    Replica,
    ReplicaList,
    ReplicaState,
    RolloutCard,
    Status,
)
from lora_serve.server.admin.audit import CallAudit
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response

if TYPE_CHECKING:
    from lora_serve.server.adapter_names import AdapterNames
    from lora_serve.server.context import ServerContext
    from lora_serve.server.openai.answers import ModelCard


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


def rollout_card(rollout: Rollout, *, is_whole: bool = True) -> RolloutCard:
    """is_whole: with all replicas, not only those that lack the change."""
    told = rollout.replicas if is_whole else rollout.missing
    return _card(
        rollout.record,
        rollout.is_everywhere,
        len(rollout.replicas),
        [ReplicaState(one.replica_id, one.address, one.state.value, one.detail) for one in told],
    )


async def with_rollouts(
    names: AdapterNames, cards: Sequence[ModelCard], *, is_whole: bool = False
) -> list[ModelCard]:
    """The cards, those of adapters with how far their last changes came."""
    try:
        rollouts = await names.rollouts([card.id for card in cards])
    except CatalogUnavailableError:
        return list(cards)
    return [
        replace(card, rollout=rollout_card(rollouts[card.id], is_whole=is_whole))
        if card.id in rollouts
        else card
        for card in cards
    ]


def _card(
    record: Record, is_everywhere: bool, num_replicas: int, told: list[ReplicaState]
) -> RolloutCard:
    return RolloutCard(
        serial=record.serial,
        by=record.by,
        at=record.replica,
        time=record.time,
        everywhere=is_everywhere,
        num_replicas=num_replicas,
        replicas=told,
    )


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
