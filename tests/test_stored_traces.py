"""The oracle's random lives over the real store: files on a disk, a real Redis, threads, faults.

What lies there outlives the engines; between two of them files are damaged, and a tier fails by
chance. Threads make a life differ from run to run; its answers must not.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.tier_store import OracleTierStore
from lora_serve.fuzz.oracle.tiered_traces import TieredResult, TieredTrace
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Drop, FetchResult, Loaded, Tier, TierNamespace, TierStats
from lora_serve.kv_tiers.disk.tier import DiskTier
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.kv_tiers.ram import RamTier
from lora_serve.kv_tiers.redis.tier import RedisTier
from lora_serve.kv_tiers.store import TieredStore
from tests.fakes.faulty_tier import FaultyTier
from tests.fakes.redis_server import RedisServer, running_redis

OpenTiers = Callable[[random.Random], list[Tier]]
KIB = 2**10


class StoredTiers(OracleTierStore):
    """A real store in the place of the oracle's own, which every engine opens anew."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        super().__init__()
        self.news = threading.Event()
        self._store = TieredStore(tiers, self.news.set, close_seconds=5.0)

    def may_have(self, namespace: TierNamespace, first: BlockHash) -> bool:
        return self._store.may_have(namespace, first)

    def fetch(
        self,
        ticket: int,
        namespace: TierNamespace,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
    ) -> None:
        self._store.fetch(ticket, namespace, hashes, deadline_seconds)

    def cancel(self, ticket: int) -> None:
        self.num_cancelled += 1
        self._store.cancel(ticket)

    def take_results(self) -> list[FetchResult]:
        return self._store.take_results()

    def not_asked(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        self._store.not_asked(namespace, hashes)

    def save(
        self,
        namespace: TierNamespace,
        blocks: Sequence[tuple[BlockHash, bytes]],
        *,
        is_urgent: bool = False,
    ) -> None:
        self._store.save(namespace, blocks, is_urgent=is_urgent)

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        self._store.touch(namespace, hashes)

    def drop(self, drop: Drop) -> Forgetting:
        return self._store.drop(drop)

    def stats(self) -> TierStats:
        return self._store.stats()

    def flush(self) -> None:
        self._store.flush(5.0)

    def close(self) -> None:
        self._store.close()


class PatientEngine(OracleEngine):
    """Gives the store's threads time when there is nothing else to do."""

    news: threading.Event

    @property
    def awaits_tiers(self) -> bool:
        """Whether threads work for it. Adapters and grammars are the oracle's, which has none."""
        core = self.core
        is_served = core.scheduler.num_fetching > 0 or core._in_handover.next_due is not None
        return is_served or core._admin.is_waiting

    def step(self) -> bool:
        has_run = super().step()
        if not has_run and self.awaits_tiers:
            self.news.wait(0.005)  # a tenth of what the oracle's clock says
            self.news.clear()
        return has_run


class StoredTrace(TieredTrace):
    """`between` damages what lies in the tiers while no engine runs."""

    def __init__(
        self, seed: int, tiers: OpenTiers, between: Callable[[random.Random], None] | None = None
    ) -> None:
        self._open_tiers = tiers
        self._between = between
        self._is_built = False
        super().__init__(seed)
        self._is_built = True
        self.settings["kv_tiers"] = replace(self.settings["kv_tiers"], kv_load_deadline_ms=60_000)
        self.engine = self._new_engine()

    def _new_engine(self) -> OracleEngine:
        if not self._is_built:
            return super()._new_engine()
        if isinstance(self.store, StoredTiers):
            if self.rng.random() < 0.7:  # what is on its way gets there, or is lost
                self.store.flush()
            self.store.close()
            if self._between:
                self._between(self.rng)
        self.store = StoredTiers(self._open_tiers(random.Random(self.rng.random())))
        engine = PatientEngine(**self.settings, store=self.store)
        engine.news = self.store.news
        return engine

    def run(self, num_operations: int = 200) -> TieredResult:
        try:
            super().run(num_operations)
        finally:
            self.store.close()
        return self.tiered


def over_disk(path: Path) -> OpenTiers:
    """RAM and disk too small for all, the disk failing by chance under some engines."""

    def open_tiers(chance: random.Random) -> list[Tier]:
        disk = DiskTier(path, 256 * KIB, poll_seconds=0.05)
        return [RamTier(32 * KIB), FaultyTier(disk, chance if chance.random() < 0.3 else None)]

    return open_tiers


def flip_some(path: Path) -> Callable[[random.Random], None]:
    def flip(chance: random.Random) -> None:
        files = sorted(path.glob("namespaces/*/*.kv"))
        for file in files if chance.random() < 0.3 else ():
            data = bytearray(file.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data[: chance.choice((len(data), len(data) - 1))])

    return flip


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory) as server:
        yield server


def add_up(results: Sequence[TieredResult]) -> tuple[int, int, int]:
    """Restarts, tokens from the tiers, and wrong answers."""
    return (
        sum(result.num_restarts for result in results),
        sum(result.num_tier_tokens for result in results),
        sum(len(result.wrong) for result in results),
    )


@pytest.mark.parametrize("num_traces", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_every_answer_over_a_disk_that_fails_is_the_lone_answer(
    tmp_path: Path, num_traces: int
) -> None:
    results = []
    for seed in range(num_traces):
        path = tmp_path / str(seed)
        results.append(StoredTrace(seed, over_disk(path), flip_some(path)).run())
    num_restarts, num_found, num_wrong = add_up(results)
    assert num_wrong == 0
    assert num_found > 50 * num_traces
    assert num_restarts > num_traces


@pytest.mark.parametrize("num_traces", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_every_answer_over_redis_is_the_lone_answer(redis: RedisServer, num_traces: int) -> None:
    """All lives share one server, as replicas do."""

    def open_tiers(chance: random.Random) -> list[Tier]:
        return [FaultyTier(RedisTier(redis.url, 5.0), chance if chance.random() < 0.3 else None)]

    results = [StoredTrace(seed, open_tiers).run() for seed in range(num_traces)]
    _, num_found, num_wrong = add_up(results)
    assert num_wrong == 0
    assert num_found > 30 * num_traces


class BelievesWhatItReads(FaultyTier):
    """A tier without the checks: what was flipped comes through."""

    def load(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> Loaded:
        loaded = super().load(namespace, hashes)
        flipped = [
            replace(record, payload=bytes(byte ^ 1 for byte in record.payload))
            for record in loaded.records
        ]
        return replace(loaded, records=tuple(flipped))


def test_the_traces_catch_a_tier_that_checks_nothing(tmp_path: Path) -> None:
    def open_tiers(chance: random.Random) -> list[Tier]:
        return [BelievesWhatItReads(DiskTier(tmp_path, 256 * KIB))]

    assert any(StoredTrace(seed, open_tiers).run().wrong for seed in range(4))
