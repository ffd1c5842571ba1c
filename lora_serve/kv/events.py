"""KV events as values: what a consumer is told of the KV that can be found here.

Each names blocks by their hash in the chain of `identity.py`. How they are written for a consumer
is not said here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from lora_serve.identity import BlockHash


class Medium(StrEnum):
    """Where blocks lie: on the device, in this process's memory, or where other replicas look."""

    GPU = "GPU"
    CPU = "CPU"
    STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that blocks of one event have in common, as far as a consumer is told of it.

    lora_name: None for the base model. lora_id: another number for each version of a name; None
    for the base model. salt: stands for the cache salt and does not give it away; "" without one.
    """

    lora_name: str | None = None
    lora_id: int | None = None
    salt: str = ""


@dataclass(slots=True)
class BlockStored:
    """Consecutive blocks of one chain can be found from now on.

    parent: the block before the first; None if that is the first of its chain. token_ids: of all of
    them, 0 where an embedding row stands; none where the blocks were told of on another medium.
    embeds: of each block what stands for its embedding rows, "" if it has none.
    """

    medium: Medium
    group: int
    namespace: Namespace
    parent: BlockHash | None
    block_hashes: list[BlockHash] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    embeds: list[str] = field(default_factory=list)


@dataclass(slots=True)
class BlockRemoved:
    """These blocks are not found there any more."""

    medium: Medium
    group: int
    block_hashes: list[BlockHash] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing that was told before can be found, on any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
