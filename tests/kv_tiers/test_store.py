from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import FetchResult, Tier, TierNamespace
from lora_serve.kv_tiers.disk import DiskTier
from lora_serve.kv_tiers.ram import RamTier
from lora_serve.kv_tiers.store import TieredStore
from tests.fakes.kv_blocks import a_namespace, blocks, chain, content


class Caller:
    """What an engine does with a store: asks, waits to be notified, takes results."""

    def __init__(self, *tiers: Tier) -> None:
        self._notified = threading.Event()
        self.store = TieredStore(tiers, self._notified.set)
        self._num_tickets = 0

    def fetch(
        self, namespace: TierNamespace, hashes: Sequence[BlockHash], seconds: float = 5.0
    ) -> FetchResult:
        self._num_tickets += 1
        self.store.fetch(self._num_tickets, namespace, hashes, seconds)
        return self.result(self._num_tickets)

    def result(self, ticket: int) -> FetchResult:
        while True:
            self._notified.clear()
            for result in self.store.take_results():
                if result.ticket == ticket:
                    return result
            assert self._notified.wait(10), "no result within 10 s"

    def save(self, namespace: TierNamespace, hashes: list[BlockHash]) -> None:
        self.store.save(namespace, blocks(namespace, hashes))
        assert self.store.flush(10)


@contextmanager
def calling(*tiers: Tier) -> Iterator[Caller]:
    caller = Caller(*tiers)
    try:
        yield caller
    finally:
        caller.store.close()


def contents(namespace: TierNamespace, hashes: Sequence[BlockHash]) -> list[bytes]:
    return [content(namespace, block_hash) for block_hash in hashes]


NS = a_namespace()
HASHES = chain(NS, "a prompt", 20)


def test_what_was_saved_is_fetched_from_ram() -> None:
    with calling(RamTier(2**20)) as caller:
        caller.save(NS, HASHES)
        result = caller.fetch(NS, HASHES)
    assert result.blocks == tuple(contents(NS, HASHES))
    assert result.num_blocks_by_tier == {"ram": 20}
    assert not result.causes


def test_what_was_saved_survives_a_restart_on_disk(tmp_path: Path) -> None:
    with calling(RamTier(2**20), DiskTier(tmp_path, 2**20)) as caller:
        caller.save(NS, HASHES)
    with calling(RamTier(2**20), DiskTier(tmp_path, 2**20)) as caller:
        result = caller.fetch(NS, HASHES)
        assert result.blocks == tuple(contents(NS, HASHES))
        assert result.num_blocks_by_tier == {"disk": 20}
        assert caller.store.flush(5)
        assert caller.fetch(NS, HASHES).num_blocks_by_tier == {"ram": 20}
