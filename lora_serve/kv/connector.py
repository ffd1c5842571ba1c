"""What the scheduler asks of the KV tiers' end in the control plane, and its answers without tiers.

A connector decides what to fetch, to fill in and to store. It does no I/O, and bytes pass through
it unread: from the store into a step's loads, from its saves into the store.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

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
    """A step's part in moving KV, as `SchedulerOutput` carries it."""

    saves: tuple[int, ...] = ()
    loads: tuple[KVLoad, ...] = ()


NOTHING = TransferPlan()


@dataclass(frozen=True, slots=True)
class FetchesEnded(Generic[R]):
    """Requests that go on; and those that must not, because a tier failed, by the policy."""

    ready: list[R] = field(default_factory=list)
    failed: list[tuple[R, Cause]] = field(default_factory=list)


class KVConnector(Generic[R]):
    """The connector of an engine without tiers: nothing is fetched, nothing stored."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for fetches."""
        return 0

    @property
    def next_give_up_time(self) -> float | None:
        """When the first of them goes on, whatever the store does."""
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
        """How many blocks after its hit were fetched for a request that is to be admitted."""
        return 0

    def admitted(self, request: R, num_hit_blocks: int) -> dict[str, int]:
        """A request got its blocks, the first num_hit_blocks of them from the device cache.

        Plans to fill what follows with what was fetched for it, as far as the request holds blocks
        there; tells how many blocks of each tier.
        """
        return {}

    def committed(self, request: R, blocks: range) -> None:
        """A step has written these blocks of a running request. Plans to store them."""

    def handover(self, request_id: str) -> Handover | None:
        """How much of its prompt's KV others can find yet; None without tiers."""
        return None

    def end_handover(self, request_id: str) -> None:
        """It is waited for no longer."""

    def handed_over(self) -> Collection[str]:
        """The requests whose handover has begun and not ended."""
        return ()

    def forget(self, request: R) -> None:
        """A request no longer waits for what was fetched for it."""

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
