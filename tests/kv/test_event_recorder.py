"""What one change makes the recorder tell; tests/test_event_traces.py has the sum of them all."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_serve.identity import (
    BASE_MODEL,
    AdapterRef,
    BlockHash,
    BlockHasher,
    CacheNamespace,
    NoAdapter,
)
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium
from lora_serve.kv_tiers.base import Drop, TierNamespace

BLOCK = 4
OLD, NEW = AdapterRef("tenant", b"old"), AdapterRef("tenant", b"new")


@dataclass
class Request:
    token_ids: list[int]
    adapter: AdapterRef | NoAdapter = BASE_MODEL
    cache_salt: str = ""
    embeds_digests: tuple[bytes, ...] = ()
    block_hashes: list[BlockHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        hasher = BlockHasher()
        parent = hasher.root(self.namespace_of(0))
        for start in range(0, len(self.token_ids), BLOCK):
            parent = hasher.extend(parent, self.token_ids[start : start + BLOCK])
            self.block_hashes.append(parent)

    def namespace_of(self, block: int) -> CacheNamespace:
        return CacheNamespace(b"model", self.adapter, self.cache_salt)


def a_recorder(num_groups: int = 1) -> KVEventRecorder:
    recorder = KVEventRecorder(BLOCK, num_groups)
    assert recorder.take() == [AllBlocksCleared()]
    return recorder


def store(recorder: KVEventRecorder, request: Request, group: int = 0) -> None:
    for index in range(len(request.block_hashes)):
        recorder.stored(request, index, group)


def tier_namespace(adapter: AdapterRef | NoAdapter) -> TierNamespace:
    name, digest = ("", b"") if adapter is BASE_MODEL else (adapter.name, adapter.digest)
    return TierNamespace(name.encode() + digest, b"model", name, digest, 0, b"", b"l", 1)


def outline(events: list[KVEvent]) -> list[tuple[str, str, int]]:
    """The kind and the medium of each event, and how many blocks it names."""
    return [
        (type(event).__name__, "", 0)
        if isinstance(event, AllBlocksCleared)
        else (type(event).__name__, event.medium.value, len(event.block_hashes))
        for event in events
    ]


def test_consecutive_blocks_are_one_event_with_their_tokens() -> None:
    recorder, request = a_recorder(), Request(list(range(12)), cache_salt="secret")
    store(recorder, request)
    (event,) = recorder.take()
    assert isinstance(event, BlockStored)
    assert (event.parent, event.block_hashes) == (None, request.block_hashes)
    assert event.token_ids == list(range(12))
    assert event.namespace.salt.startswith("salt:")
    assert "secret" not in str(event)
    store(recorder, Request([*range(4), 9, 9, 9, 9]))
    recorder.removed(request.block_hashes[2], 0)
    recorder.removed(request.block_hashes[1], 0)
    recorder.removed(BlockHash(b"unknown"), 0)
    assert outline(recorder.take()) == [("BlockStored", "GPU", 2), ("BlockRemoved", "GPU", 2)]
    assert recorder.take() == []


def test_rows_of_embeddings_are_told_by_a_tag() -> None:
    recorder = a_recorder()
    store(recorder, Request([0] * 4 + [5] * 4, embeds_digests=(bytes(range(32)), b"")))
    (event,) = recorder.take()
    assert isinstance(event, BlockStored)
    assert event.embeds == [f"embeds:{bytes(range(16)).hex()}", ""]


def test_a_replaced_versions_blocks_are_taken_back_first_and_told_again_when_it_is_back() -> None:
    recorder, prompt = a_recorder(), list(range(8))
    recorder.name_stands_for("tenant", OLD)
    old, new = Request(prompt, OLD), Request(prompt, NEW)
    store(recorder, old)
    recorder.name_stands_for("tenant", NEW)
    store(recorder, new)
    late = Request([*prompt, 1, 2, 3, 4], OLD)
    recorder.stored(late, 2, 0)  # by a request of the old version that still runs
    first, gone, second = recorder.take()
    assert isinstance(first, BlockStored)
    assert isinstance(gone, BlockRemoved)
    assert isinstance(second, BlockStored)
    assert gone.block_hashes == old.block_hashes
    assert (second.block_hashes, second.namespace.lora_name) == (new.block_hashes, "tenant")
    assert first.namespace.lora_id != second.namespace.lora_id
    recorder.name_stands_for("tenant", OLD)
    gone, again = recorder.take()
    assert isinstance(gone, BlockRemoved)
    assert isinstance(again, BlockStored)
    assert gone.block_hashes == new.block_hashes
    assert again.block_hashes == late.block_hashes
    recorder.name_stands_for("tenant", None)
    recorder.removed(old.block_hashes[0], 0)  # evicted while nobody is told of it
    assert outline(recorder.take()) == [("BlockRemoved", "GPU", 3)]


def test_a_block_is_told_again_behind_its_parent_though_that_was_cached_later() -> None:
    recorder, request = a_recorder(), Request(list(range(12)), OLD)
    recorder.name_stands_for("tenant", OLD)
    store(recorder, request)
    recorder.removed(request.block_hashes[0], 0)
    recorder.stored(request, 0, 0)
    recorder.name_stands_for("tenant", NEW)
    recorder.take()
    recorder.name_stands_for("tenant", OLD)
    (event,) = recorder.take()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == request.block_hashes


def test_a_copy_in_a_tier_is_told_once_its_block_is_known() -> None:
    recorder, request = a_recorder(num_groups=2), Request(list(range(4)))
    namespace, hashes = tier_namespace(BASE_MODEL), request.block_hashes
    recorder.tiers.stored("disk", namespace, hashes)
    assert recorder.take() == []
    store(recorder, request)
    events = recorder.take()
    assert outline(events) == [("BlockStored", "GPU", 1), *[("BlockStored", "STORAGE", 1)] * 2]
    assert [event.group for event in events if isinstance(event, BlockStored)] == [0, 0, 1]
    recorder.removed(hashes[0], 0)
    recorder.tiers.stored("ram", namespace, hashes)  # still known, from the disk
    assert outline(recorder.take()) == [
        ("BlockRemoved", "GPU", 1),
        *[("BlockStored", "CPU", 1)] * 2,
    ]
    recorder.tiers.removed("disk", hashes)
    recorder.tiers.removed("ram", hashes)
    media = [event.medium for event in recorder.take() if isinstance(event, BlockRemoved)]
    assert media == [Medium.STORAGE, Medium.STORAGE, Medium.CPU, Medium.CPU]


def test_a_replaced_versions_copies_are_taken_back_too() -> None:
    recorder, request = a_recorder(), Request(list(range(4)), OLD)
    recorder.name_stands_for("tenant", OLD)
    store(recorder, request)
    recorder.tiers.stored("ram", tier_namespace(OLD), request.block_hashes)
    recorder.take()
    recorder.name_stands_for("tenant", NEW)
    assert outline(recorder.take()) == [("BlockRemoved", "GPU", 1), ("BlockRemoved", "CPU", 1)]
    recorder.name_stands_for("tenant", OLD)
    assert outline(recorder.take()) == [("BlockStored", "GPU", 1), ("BlockStored", "CPU", 1)]


def test_all_is_cleared_by_one_event_and_told_anew_after_a_loss() -> None:
    recorder, request = a_recorder(), Request(list(range(4)))
    recorder.name_stands_for("tenant", OLD)
    store(recorder, request)
    store(recorder, Request(list(range(8)), OLD))
    recorder.tiers.stored("ram", tier_namespace(BASE_MODEL), request.block_hashes)
    recorder.take()
    recorder.begin_anew()
    assert outline(recorder.take()) == [
        ("AllBlocksCleared", "", 0),
        ("BlockStored", "GPU", 1),
        ("BlockStored", "GPU", 2),
        ("BlockStored", "CPU", 1),
    ]
    recorder.cleared()
    recorder.removed(request.block_hashes[0], 0)  # as the pool forgets it
    recorder.tiers.dropping(Drop(b"model"), ("ram",))
    assert outline(recorder.take()) == [("AllBlocksCleared", "", 0)]
    recorder.begin_anew()
    assert outline(recorder.take()) == [("AllBlocksCleared", "", 0)]
