"""Random lives of engines over one store of KV that outlives them and fails in many ways."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from lora_serve.config import KVTierConfig
from lora_serve.config.kv_tiers import KV_ROLES
from lora_serve.fuzz.oracle.content import SLOT_BYTES
from lora_serve.fuzz.oracle.draws import RequestDraws
from lora_serve.fuzz.oracle.engine import BLOCK_SIZE, OracleEngine
from lora_serve.fuzz.oracle.executor import MakeExecutor, OracleExecutor
from lora_serve.fuzz.oracle.expected import TraceResult
from lora_serve.fuzz.oracle.loader import OracleLoader
from lora_serve.fuzz.oracle.tier_store import Faults, OracleTierStore
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.identity import BlockHasher
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv.tiered_connector import TieredConnector
from lora_serve.kv_groups import KVGroup
from lora_serve.messages import ErrorInfo
from lora_serve.scheduler.request import Request

FEW_BLOCKS = 4 * BLOCK_SIZE * SLOT_BYTES  # bytes of the oracle's KV: no more may be fetched at once


@dataclass
class TieredResult(TraceResult):
    num_tier_tokens: int = 0
    num_restarts: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_handed_over: int = 0


class ForkedDraws(RequestDraws):
    """Prompts have one of few beginnings that fork, so that requests share parts of their KV."""

    def _prompt(self) -> list[int]:
        pieces = [prefix[:20] for prefix in self.prefixes]
        chosen = self.rng.choices(pieces, weights=(4, 2, 1), k=self.rng.randrange(1, 6))
        return [*(token for piece in chosen for token in piece), *self._tokens(1)]


class TieredTrace(OracleTrace):
    """A trace with tiers, in which the engine is killed or stopped now and then."""

    draws_class = ForkedDraws

    def __init__(
        self,
        seed: int,
        kv_class: type[KVCacheManager] = KVCacheManager,
        hasher_class: type[BlockHasher] = BlockHasher,
        connector_class: type[TieredConnector[Request]] = TieredConnector,
        executor_class: MakeExecutor = OracleExecutor,
        async_scheduling: bool = False,
        groups: tuple[KVGroup, ...] | None = None,
        loader_class: type[OracleLoader] = OracleLoader,
        recorder_class: type[KVEventRecorder] | None = None,
    ) -> None:
        self.store = OracleTierStore()
        self.role_rng = random.Random(f"roles {seed}")
        super().__init__(
            seed,
            kv_class,
            hasher_class,
            executor_class,
            async_scheduling,
            groups,
            loader_class=loader_class,
            recorder_class=recorder_class,
        )
        rng = self.rng
        self.store.rng = rng
        self.store.faults = Faults(
            delay=rng.choice((0, 1, 5)),
            silent=rng.choice((0, 0.1)),
            loses_saves=rng.choice((0, 0.1)),
            loses_fetches=rng.choice((0, 0.05)),
            fails=rng.choice((0, 0.1)),
        )
        self.settings |= {
            "num_blocks": len(self.settings["groups"]) * rng.choice((12, 16, 24, 60)),
            "enable_prefix_caching": rng.random() < 0.6,
            "kv_tiers": KVTierConfig(
                kv_store_policy=rng.choice(("all", "all", "prompt-only", "after-n-hits")),
                kv_load_failure_policy=rng.choice(("recompute", "recompute", "fail")),
            ),
            "max_fetched_bytes": len(self.settings["groups"]) * rng.choice((FEW_BLOCKS, 2**20)),
            "connector_class": connector_class,
        }
        if recorder_class is not None:
            self._tell_of_events()
        self.tiered = TieredResult()
        self.result = self.tiered
        self.engine = self._new_engine()

    def _tell_of_events(self) -> None:
        """Have something to tell of: a device cache, and tiers that forget soon."""
        self.settings["enable_prefix_caching"] = True
        self.settings["kv_tiers"] = replace(
            self.settings["kv_tiers"], kv_stale_version_seconds=self.rng.choice((0, 1, 60))
        )
        self.store.faults.evicts = self.rng.choice((0, 0.2))

    def _is_handed_over(self) -> bool:
        role = self.engine.kv_tiers.kv_role
        return role != "kv_consumer" and self.role_rng.random() < 0.3

    def _new_engine(self) -> OracleEngine:
        """One engine after another over one store: what the first computes, the next may find."""
        role = self.role_rng.choice((*KV_ROLES, "kv_both", "kv_both", "kv_both"))
        tiers = self.settings.get("kv_tiers", KVTierConfig())
        self.settings["kv_tiers"] = replace(tiers, kv_role=role)
        self.store = self.store.restarted()
        return OracleEngine(**self.settings, store=self.store)

    def _operate(self) -> None:
        choice = self.rng.random()
        if choice < 0.04:
            self._restart()
        elif choice < 0.3:
            for _ in range(30):  # long enough for answers to end and blocks to be used again
                self.engine.step()
                self._settle_loads()
        elif choice < 0.36:
            self._add_together()
        else:
            super()._operate()

    def _add_together(self) -> None:
        """Add several that may wait for one fetch, and whose prompts part within it."""
        namespace = self._namespace()
        for _ in range(self.rng.randrange(2, 5)):
            self._add(namespace)

    def _restart(self) -> None:
        """Start another engine, maybe with other adapters, over the same store."""
        self.tiered.num_restarts += 1
        if self.rng.random() < 0.5:
            self.pauses.resume(self.engine)
            self.engine.run()
            self._settle_loads()
            self._judge()
        else:
            for expected in self.expected.values():
                expected.is_aborted = True  # killed: what was streamed before must be right
            self._judge_answers()
        names = list(self.versions)
        self.expected, self.versions, self.pending = {}, {}, {}
        self.engine = self._new_engine()
        self.pauses.forget()
        for name in names:
            self._load(name, inplace=True)
        self._settle_all_loads()

    def _is_excused(self, error: ErrorInfo) -> bool:
        is_failed = error.kind == "KVLoadError"
        if is_failed:
            self.tiered.num_failed += 1
            assert self.settings["kv_tiers"].kv_load_failure_policy == "fail", error
        return is_failed or super()._is_excused(error)

    def _settle_all_loads(self) -> None:
        while self.pending:
            self.engine.step()
            self._settle_loads()

    def _judge_answers(self) -> None:
        super()._judge_answers()
        for outputs in self.engine.outputs.values():
            self.tiered.num_handed_over += bool(outputs[-1].num_stored_tokens)
        self.tiered.num_tier_tokens += self.engine.core.scheduler.totals.external_cache_hits
        self.tiered.num_cancelled += self.store.num_cancelled
