"""The connector: what the scheduler asks about KV in tiers. Here are its answers without tiers.

A connector decides what to fetch, to fill in and to store. It does no I/O, and bytes pass through
it unread: from the store into a step's loads, from its saves into the store.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from lora_serve.identity import CacheNamespace, Everything
from lora_serve.kv.block_table import BlockTable
from lora_serve.kv.handovers import Handover
from lora_serve.kv.store_policy import StoredRequest
from lora_serve.kv.tier_copies import TierCopies
from lora_serve.kv_tiers.base import Cause, TierStats
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.step import KVLoad


class TieredRequest(StoredRequest, Hashable, Protocol):
    """The part of a request that a connector looks at."""

    request_id: str
    do_remote_decode: bool
    block_tables: list[BlockTable]
    num_committed_blocks: int

    @property
    def num_sharable_blocks(self) -> int: ...

    def namespace_of(self, block: int) -> CacheNamespace: ...


R = TypeVar("R", bound=TieredRequest)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The blocks that a step copies to and from the tiers, as `SchedulerOutput` carries them."""

    saves: tuple[int, ...] = ()
    loads: tuple[KVLoad, ...] = ()


NOTHING = TransferPlan()


class FetchesEnded(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """Requests whose fetches have ended.

    ready: they go on. failed: they must end, as --kv-load-failure-policy says, and why.
    """

    ready: list[R] = []
    failed: list[tuple[R, Cause]] = []


class KVConnector(Generic[R]):
    """The connector of an engine without tiers: nothing is fetched, nothing stored."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for fetches."""
        return 0

    @property
    def next_give_up_time(self) -> float | None:
        """When the first of these requests goes on, whatever the store does; None without any."""
        return None

    def fetch(self, request: R, first_block: int, last_block: int) -> bool:
        """Begin to fetch blocks [first_block, last_block) of a waiting request's chain.

        False if there is nothing to wait for: no tier may have them, or they were asked for.
        """
        return False

    def take_fetched(self) -> FetchesEnded[R]:
        """The requests whose waiting has ended since the last call."""
        return FetchesEnded()

    def num_fetched(self, request: R, num_hit_blocks: int) -> int:
        """How many blocks were fetched for a request, behind those found in the device cache."""
        return 0

    def admitted(self, request: R, num_hit_blocks: int) -> dict[str, int]:
        """Take note that a request got its blocks, the first num_hit_blocks from the device cache.

        Plans to fill the next ones with what was fetched for it; returns how many come from each
        tier.
        """
        return {}

    def committed(self, request: R, blocks: range) -> None:
        """Plan to store these blocks of a running request, which a step has written."""

    def handover(self, request_id: str) -> Handover | None:
        """How much of a prompt's KV other servers can find by now; None without tiers."""
        return None

    def end_handover(self, request_id: str) -> None:
        """Stop waiting until other servers find a request's KV."""

    def handed_over(self) -> Collection[str]:
        """The requests whose handover has begun and not ended."""
        return ()

    def forget(self, request: R) -> None:
        """Drop what was, or is being, fetched for a request that no longer waits for it."""

    def plan(self) -> TransferPlan:
        """What the next step moves; `gathered` must follow once it has run."""
        return NOTHING

    def gathered(self, blobs: Sequence[bytes]) -> None:
        """Store what a step gathered."""

    def reset(self, lora_name: str | Everything) -> tuple[list[R], Forgetting]:
        """Forget KV everywhere, all or one adapter's; nothing of it is used from now on.

        Returns the requests that waited for it, and what tells when the tiers have forgotten, too.
        """
        return [], Forgetting()

    def record_copies(self, copies: TierCopies) -> None:
        """Tell `copies` what enters and leaves the tiers from now on."""

    def drop_stale(self, lora_name: str, digest: bytes, generation: int) -> None:
        """Forget the KV of all versions of an adapter but this one."""

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        """Let the store finish what it has begun."""

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
