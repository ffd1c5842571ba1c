"""The connector over a store of tiers: which blocks to fetch, to fill in and to store.

A block's place in the tiers is its place in the chain of `identity.py`; there is no second key. A
record holds the blocks of all groups at that place, side by side: it is stored if a request holds
all of them, and fills those that the request it was fetched for holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from lora_serve.config import KVTierConfig
from lora_serve.identity import (
    BASE_MODEL,
    BASE_MODEL_NAME,
    AdapterRef,
    BlockHash,
    BlockHasher,
    CacheNamespace,
    Everything,
    salt_digest,
)
from lora_serve.kv.block_table import BlockTable
from lora_serve.kv.connector import FetchesEnded, KVConnector, R, TieredRequest, TransferPlan
from lora_serve.kv.fetches import Fetch, Fetches
from lora_serve.kv.handovers import Handover, Handovers
from lora_serve.kv.saves import PendingSaves
from lora_serve.kv.store_policy import make_store_policy
from lora_serve.kv.tier_copies import TierCopies
from lora_serve.kv.touches import RecentTouches
from lora_serve.kv_tiers.base import (
    Buffer,
    Drop,
    FetchResult,
    TierNamespace,
    TierStats,
    TierWatcher,
)
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.model_info import ModelInfo
from lora_serve.step import KVLoad

MAX_FETCHED_BYTES = 2**30  # blocks that were fetched and wait for their requests' admission
GIVE_UP_FACTOR = 2.0  # a store keeps its deadlines; one that hangs is not waited for much longer
NAMESPACES_REMEMBERED = 1024


class TierStore(Protocol):
    """`kv_tiers.store.TieredStore`, or a test's own. Every method but `close` returns at once."""

    def may_have(self, namespace: TierNamespace, first: BlockHash) -> bool: ...

    def fetch(
        self,
        ticket: int,
        namespace: TierNamespace,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
    ) -> None: ...

    def cancel(self, ticket: int) -> None: ...

    def take_results(self) -> list[FetchResult]: ...

    def not_asked(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None: ...

    def save(
        self,
        namespace: TierNamespace,
        blocks: Sequence[tuple[BlockHash, bytes]],
        *,
        is_urgent: bool = False,
    ) -> None: ...

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None: ...

    def drop(self, drop: Drop) -> Forgetting: ...

    def watch(self, watcher: TierWatcher) -> None: ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Save what waits, within bounds, and end all threads."""


def _tell_no_one() -> None:
    """Wake no thread when a fetch has come. Small worlds are pickled, which lambdas cannot be."""


class TieredConnector(KVConnector[R]):
    """The connector over a store. clock: time.monotonic, which the store's deadlines follow, too.

    model: fingerprint of the model, whose KV alone is ever dropped.
    """

    def __init__(
        self,
        config: KVTierConfig,
        store: TierStore,
        model: bytes,
        namespaces: Callable[[CacheNamespace], TierNamespace],
        block_bytes: int,
        clock: Callable[[], float],
        max_fetched_bytes: int = MAX_FETCHED_BYTES,
        notify: Callable[[], None] = _tell_no_one,
    ) -> None:
        self._deadline_seconds = config.kv_load_deadline_ms / 1e3
        self._must_fail = config.kv_load_failure_policy == "fail"
        self._store = store
        self._namespace = namespaces
        self._model = model
        self._clock = clock
        self._policy = make_store_policy(config)
        self._fetches: Fetches[R] = Fetches(block_bytes, max_fetched_bytes)
        self._saves = PendingSaves()
        self._touches = RecentTouches(clock)
        self._loads: list[KVLoad] = []
        self._tier_names = tuple(figures.tier for figures in store.stats().tiers)
        self._copies: TierCopies | None = None
        self._saves_kv = config.kv_role != "kv_consumer"
        self._fetches_kv = config.kv_role != "kv_producer"
        self._handovers = Handovers(notify)
        store.watch(self._handovers)

    def record_copies(self, copies: TierCopies) -> None:
        self._copies = copies
        self._store.watch(copies)

    @property
    def num_waiting(self) -> int:
        return self._fetches.num_waiting

    @property
    def next_give_up_time(self) -> float | None:
        return self._fetches.next_give_up_time

    def fetch(self, request: R, first_block: int, last_block: int) -> bool:
        if not self._fetches_kv:
            return False
        if first_block >= last_block or self._fetches.has_asked(request, first_block):
            return False
        # A fetch is of one namespace: what is behind its last block is computed.
        run, *_ = _runs_by_namespace(request, range(first_block, last_block))
        namespace, hashes = (
            self._namespace(run.namespace),
            request.block_hashes[: run.blocks[-1] + 1],
        )
        if self._fetches.join(request, hashes, first_block):
            return True
        if not self._store.may_have(namespace, hashes[first_block]):
            return False
        give_up_time = self._clock() + GIVE_UP_FACTOR * self._deadline_seconds
        fetch = self._fetches.start(
            request, namespace, hashes[first_block:], first_block, give_up_time
        )
        if fetch is None:
            return False
        self._store.fetch(fetch.ticket, namespace, fetch.hashes, self._deadline_seconds)
        return True

    def take_fetched(self) -> FetchesEnded[R]:
        ended = self._fetches.take_in(self._store.take_results())
        late = self._fetches.give_up(self._clock())
        for fetch in late:
            self._store.cancel(fetch.ticket)
        woken: FetchesEnded[R] = FetchesEnded()
        for fetch in (*ended, *late):
            if fetch.failure is not None and self._must_fail:
                woken.failed.extend((request, fetch.failure) for request in fetch.members)
            else:
                woken.ready.extend(fetch.members)
        return woken

    def num_fetched(self, request: R, num_hit_blocks: int) -> int:
        fetch = self._fetches.in_hand(request)
        return len(_fetched(fetch, request, num_hit_blocks)) if fetch is not None else 0

    def admitted(self, request: R, num_hit_blocks: int) -> dict[str, int]:
        self._touch(request, num_hit_blocks)
        num_by_tier = dict.fromkeys(self._tier_names, 0)
        fetch = self._fetches.in_hand(request)
        if fetch is not None:
            records = _fetched(fetch, request, num_hit_blocks)
            self._loads += _loads(request.block_tables, records, num_hit_blocks)
            num_by_tier |= fetch.tiers_of(len(records))
        else:
            self._note_not_asked(request, num_hit_blocks)
        self.forget(request)
        chosen = self._policy.admitted(request, num_hit_blocks)
        if request.do_remote_decode:
            self._handovers.begin(request.request_id, _prompt_hashes(request))
            chosen = self._to_hand_over(request, num_hit_blocks)
        self._save(request, chosen)
        return num_by_tier

    def committed(self, request: R, blocks: range) -> None:
        chosen = self._policy.committed(request, blocks)
        if request.do_remote_decode:
            chosen = self._to_hand_over(request, blocks.stop)
        self._save(request, chosen)

    def handover(self, request_id: str) -> Handover | None:
        return self._handovers.get(request_id)

    def end_handover(self, request_id: str) -> None:
        self._handovers.end(request_id)

    def handed_over(self) -> Collection[str]:
        return self._handovers.request_ids()

    def _to_hand_over(self, request: R, end: int) -> range:
        """The blocks before `end` that the tiers were not offered yet, whatever the policy says."""
        handover = self._handovers.get(request.request_id)
        assert handover is not None, f"{request.request_id} was committed and never admitted"
        first, handover.num_offered = handover.num_offered, max(end, handover.num_offered)
        return range(first, end)

    def forget(self, request: R) -> None:
        ticket = self._fetches.forget(request)
        if ticket is not None:
            self._store.cancel(ticket)

    def plan(self) -> TransferPlan:
        loads, self._loads = tuple(self._loads), []
        return TransferPlan(self._saves.plan(), loads)

    def gathered(self, blobs: Sequence[bytes]) -> None:
        for run, blocks in self._saves.gathered(blobs):
            self._store.save(run.namespace, blocks, is_urgent=run.is_urgent)

    def reset(self, lora_name: str | Everything) -> tuple[list[R], Forgetting]:
        dropped = self._fetches.drop(lora_name)
        for fetch in dropped:
            self._store.cancel(fetch.ticket)
        self._saves.forget(lora_name)
        return _members(dropped), self._drop(Drop(self._model, lora_name))

    def drop_stale(self, lora_name: str, digest: bytes, generation: int) -> None:
        self._drop(Drop(self._model, lora_name, keep=(digest, generation)))

    def stats(self) -> TierStats:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()

    def check_invariants(self) -> None:
        self._fetches.check_invariants()

    def _drop(self, drop: Drop) -> Forgetting:
        if self._copies is not None:
            self._copies.dropping(drop, self._tier_names)
        return self._store.drop(drop)

    def _touch(self, request: R, num_hit_blocks: int) -> None:
        """Keep what the device cache had young in the tiers, which were not asked for it."""
        hashes = request.block_hashes[:num_hit_blocks]
        if hashes and self._touches.is_due(hashes[-1]):
            for run in _runs_by_namespace(request, range(num_hit_blocks)):
                self._store.touch(self._namespace(run.namespace), run.hashes(request))

    def _note_not_asked(self, request: R, num_hit_blocks: int) -> None:
        blocks = range(num_hit_blocks, request.num_sharable_blocks)
        for run in _runs_by_namespace(request, blocks):
            self._store.not_asked(self._namespace(run.namespace), run.hashes(request))

    def _save(self, request: R, blocks: Sequence[int]) -> None:
        if not self._saves_kv:
            return
        first_seen = max(table.num_unseen for table in request.block_tables)
        seen = [block for block in blocks if block >= first_seen]
        for run in _runs_by_namespace(request, seen):
            self._saves.add(
                self._namespace(run.namespace),
                request.block_hashes,
                request.block_tables,
                run.blocks,
                is_urgent=request.do_remote_decode,
            )


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of a request that lie in one namespace, ascending."""

    namespace: CacheNamespace
    blocks: Sequence[int]

    def hashes(self, request: TieredRequest) -> list[BlockHash]:
        return [request.block_hashes[block] for block in self.blocks]


def _runs_by_namespace(request: TieredRequest, blocks: Sequence[int]) -> Iterator[_Run]:
    """One run, or two where the adapter begins to act among these blocks."""
    if not blocks:
        return
    first, last = request.namespace_of(blocks[0]), request.namespace_of(blocks[-1])
    if first == last:
        yield _Run(first, blocks)
        return
    split = bisect_left(blocks, True, key=lambda block: request.namespace_of(block) == last)
    yield _Run(first, blocks[:split])
    yield _Run(last, blocks[split:])


def tier_namespaces(
    hasher: BlockHasher, model: ModelInfo
) -> Callable[[CacheNamespace], TierNamespace]:
    """The names of a request's KV in the tiers, remembered for the latest callers."""

    @lru_cache(NAMESPACES_REMEMBERED)
    def tier_namespace(namespace: CacheNamespace) -> TierNamespace:
        adapter = namespace.adapter
        if adapter is BASE_MODEL:
            adapter = AdapterRef(BASE_MODEL_NAME, b"")
        return TierNamespace(
            root=hasher.root(namespace),
            model=model.fingerprint,
            lora_name=adapter.name,
            digest=adapter.digest,
            generation=adapter.generation,
            salt_digest=salt_digest(namespace.cache_salt),
            layout=model.kv_layout,
            block_bytes=model.kv_block_bytes,
        )

    return tier_namespace


def _prompt_hashes(request: TieredRequest) -> list[BlockHash]:
    """The hashes of the prompt's blocks that a request with the same prompt may find."""
    return request.block_hashes[: (request.num_prompt_tokens - 1) // request.block_size]


def _members(fetches: Sequence[Fetch[R]]) -> list[R]:
    return [request for fetch in fetches for request in fetch.members]


def _fetched(fetch: Fetch[R], request: R, num_hit_blocks: int) -> tuple[Buffer, ...]:
    """What a fetch brought that this request may find: one it joined may have brought more."""
    return fetch.run_for(request.block_hashes[: request.num_sharable_blocks], num_hit_blocks)


def _loads(
    tables: Sequence[BlockTable], records: Sequence[Buffer], first_block: int
) -> Iterator[KVLoad]:
    """The records' parts for the blocks from first_block on that the request holds."""
    for block, record in enumerate(records, first_block):
        num_bytes = len(record) // len(tables)
        for group, table in enumerate(tables):
            if block >= table.num_unseen:
                part = record[group * num_bytes : (group + 1) * num_bytes]
                yield KVLoad(table.block_ids[block], part)
