"""How far changes of adapters have come among the servers that share a catalog, for answers."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from lora_serve.catalog.records import Record
from lora_serve.catalog.rollout import Rollout
from lora_serve.errors import CatalogUnavailableError
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.admin.answers import ReplicaState, RolloutCard
from lora_serve.server.openai.answers import ModelCard


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
