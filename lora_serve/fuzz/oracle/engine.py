"""An engine core over the oracle, with every part replaceable by a mutant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from lora_serve.adapters.manager import AdapterManager
from lora_serve.config import (
    CacheConfig,
    EngineConfig,
    KVTierConfig,
    LoRAConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from lora_serve.config.speculative import DRAFT_MODEL
from lora_serve.engine.core.core import EngineCore
from lora_serve.engine.core.kv_events import KVEvents
from lora_serve.engine.core.kv_tiers import StaleVersions
from lora_serve.engine.core.start import most_tokens_in_flight
from lora_serve.fuzz.oracle.content import EOS, VOCAB_SIZE
from lora_serve.fuzz.oracle.draft_model import oracle_draft_model
from lora_serve.fuzz.oracle.drafts import DraftWatch
from lora_serve.fuzz.oracle.executor import ONE_GROUP, MakeExecutor, OracleExecutor, oracle_model
from lora_serve.fuzz.oracle.grammars import OracleGrammars
from lora_serve.fuzz.oracle.indexer import OracleIndexer, OraclePublisher, RecordingHasher
from lora_serve.fuzz.oracle.loader import OracleLoader, ReadFaults
from lora_serve.fuzz.oracle.places import PlaceWatch
from lora_serve.fuzz.oracle.tier_store import OracleTierStore
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, BlockHash, BlockHasher, NoAdapter
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.kv.events import Medium
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv.tiered_connector import TieredConnector, TierStore, tier_namespaces
from lora_serve.kv_groups import KVGroup
from lora_serve.messages import (
    NO_RULES,
    CallReply,
    EngineMessage,
    EngineOutput,
    EngineRequest,
    LoadAdapter,
    StepOutputs,
    TokenRules,
)
from lora_serve.model_info import ModelInfo
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import EmbedsPrompt, MixedPrompt, Prompt, TokensPrompt, embeds_digests
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.request import Request
from lora_serve.speculation.row_costs import RowCosts

BLOCK_SIZE = 16
ROW_BYTES = 8
SECONDS_A_STEP = 0.05
READ_SECONDS = 2.0  # forty steps: an adapter is given up soon enough for a trace to see it


class OracleClock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(kw_only=True, eq=False)
class OracleEngine:
    """`EngineCore` with shorthands; replies are sorted into `outputs` and `calls`.

    store: its KV tiers, which may outlive it; none if left out. The classes may be a mutant's.
    indexer: who is told of KV events, and may outlive it, too; loses_events: how often there is
    no room for them.
    """

    num_blocks: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_loras: int = 2
    max_cpu_loras: int | None = None
    policy: str = "fcfs"
    fair_share: str = "none"
    enable_prefix_caching: bool = True
    load_delay: int = 0
    read_faults: ReadFaults | None = None
    read_rng: Random | None = None
    enable_lora: bool = True
    kv_class: type[KVCacheManager] = KVCacheManager
    hasher_class: type[BlockHasher] = BlockHasher
    store: TierStore | None = None
    kv_tiers: KVTierConfig = field(default_factory=KVTierConfig)
    max_fetched_bytes: int = 2**20
    connector_class: type[TieredConnector[Request]] = TieredConnector
    executor_class: MakeExecutor = OracleExecutor
    loader_class: type[OracleLoader] = OracleLoader
    async_scheduling: bool = False
    groups: tuple[KVGroup, ...] = ONE_GROUP
    grammars_class: type[OracleGrammars] = OracleGrammars
    max_mask_delay: int = 0
    indexer: OracleIndexer | None = None
    recorder_class: type[KVEventRecorder] = KVEventRecorder
    event_rng: Random = field(default_factory=lambda: Random(0))
    loses_events: float = 0.0
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    row_costs: RowCosts | None = None

    def __post_init__(self) -> None:
        config = self._config()
        self.executor = self.executor_class(BLOCK_SIZE, ROW_BYTES, self.groups)
        self.clock = OracleClock()
        self.loader = self.loader_class(
            config.lora,
            self.executor,
            self.clock,
            self.load_delay,
            self.read_faults,
            self.read_rng,
        )
        model, hasher = oracle_model(self.num_blocks, BLOCK_SIZE, self.groups), self.hasher_class()
        if self.speculative.method == DRAFT_MODEL:
            draft_model = oracle_draft_model(self.num_blocks // 2, BLOCK_SIZE)
            model = replace(model, draft_model=draft_model)
        if self.indexer is not None:
            hasher = RecordingHasher(hasher, self.indexer.origins)
        self.events = self._events()
        self.kv = self.kv_class(
            self.num_blocks,
            BLOCK_SIZE,
            self.enable_prefix_caching,
            self.groups,
            most_tokens_in_flight(config, model),
        )
        self.core = EngineCore(
            config,
            self.executor,
            model,
            AdapterManager(config.lora, self.loader),
            self.kv,
            hasher,
            self._connector(model, hasher),
            StaleVersions(self.kv_tiers.kv_stale_version_seconds, self.clock),
            self.grammars_class(VOCAB_SIZE, EOS, self.max_mask_delay, self.speculative.max_drafts),
            self.events,
            self.clock,
            self.row_costs,
        )
        self.drafts: DraftWatch | None = None
        if self.speculative.max_drafts:
            is_model = self.speculative.method == DRAFT_MODEL
            self.drafts = DraftWatch(
                self.speculative.is_enabled, len(self.groups) if is_model else None
            )
        self.places = PlaceWatch()
        self._num_watched = 0  # of the executor's steps
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.calls: dict[int, CallReply] = {}
        self._num_calls = 0
        self._handed_over: set[str] = set()  # requests whose answers tell how much KV is stored

    def _config(self) -> EngineConfig:
        return EngineConfig(
            cache=CacheConfig(
                block_size=BLOCK_SIZE, enable_prefix_caching=self.enable_prefix_caching
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                scheduling_policy=self.policy,
                fair_share=self.fair_share,
                async_scheduling=self.async_scheduling,
            ),
            lora=LoRAConfig(
                enable_lora=self.enable_lora,
                max_loras=self.max_loras,
                max_cpu_loras=self.max_cpu_loras,
                lora_load_timeout=READ_SECONDS,
                lora_reload_timeout=READ_SECONDS,
                lora_download_timeout=READ_SECONDS,
            ),
            speculative=self.speculative,
        )

    def _connector(self, model: ModelInfo, hasher: BlockHasher) -> KVConnector[Request]:
        if self.store is None:
            return KVConnector()
        return self.connector_class(
            self.kv_tiers,
            self.store,
            model.fingerprint,
            tier_namespaces(hasher, model),
            model.kv_block_bytes,
            self.clock,
            self.max_fetched_bytes,
        )

    def _events(self) -> KVEvents | None:
        if self.indexer is None:
            return None
        publisher = OraclePublisher(self.indexer, self.event_rng, self.loses_events)
        return KVEvents(self.recorder_class(BLOCK_SIZE, len(self.groups)), publisher)

    def _check_events(self) -> None:
        """Hold what the indexer knows against the pool and the tiers."""
        if self.indexer is None or self.events is None or self.events.has_lost:
            return
        found = {
            (Medium.GPU, group, block_hash)
            for group, by_hash in enumerate(self.kv.pool.cached_hashes)
            for block_hash in by_hash
            if self._is_current(block_hash)
        }
        own = self.store.own_hashes if isinstance(self.store, OracleTierStore) else ()
        in_tiers = {
            (medium, group, block_hash)
            for medium in (Medium.CPU, Medium.STORAGE)
            for group in range(len(self.groups))
            for block_hash in own
            if self._is_current(block_hash)
        }
        self.indexer.check(found, in_tiers)

    def _is_current(self, block_hash: BlockHash) -> bool:
        assert self.indexer is not None, "no hashes were noted"
        adapter = self.indexer.origins[block_hash].namespace.adapter
        return adapter is BASE_MODEL or self.core.adapters.current(adapter.name) == adapter

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        lora_name: str | NoAdapter = BASE_MODEL,
        max_tokens: int = 4,
        salt: str = "",
        priority: int = 0,
        tenant: str = "",
        embeds_rows: Sequence[bytes] = (),
        params: SamplingParams | None = None,
        pooling: PoolingParams | None = None,
        rules: TokenRules = NO_RULES,
        do_remote_decode: bool = False,
    ) -> None:
        params = params or SamplingParams(max_tokens=max_tokens, seed=1)
        request = GenerateRequest(
            request_id=request_id,
            prompt=prompt_of(prompt, embeds_rows),
            params=params,
            lora_name=lora_name,
            cache_salt=salt,
            priority=priority,
            tenant=tenant,
            pooling=pooling,
            do_remote_decode=do_remote_decode,
        )
        if do_remote_decode:
            self._handed_over.add(request_id)
        digests = embeds_digests(request.prompt, BLOCK_SIZE)
        self.handle(EngineRequest(request, (EOS,), digests, rules=rules))

    def load(self, name: str, path: str, content: str | None = None, inplace: bool = False) -> int:
        """Ask for a load; returns the call's id."""
        if content is not None:
            self.loader.files[path] = content
        self._num_calls += 1
        self.core.handle(LoadAdapter(self._num_calls, name, path, inplace))
        self._sort_replies()
        return self._num_calls

    def handle(self, message: EngineMessage) -> None:
        if self.drafts is not None and isinstance(message, EngineRequest):
            self.drafts.added(message.request)
        self.core.handle(message)
        self._sort_replies()

    def step(self) -> bool:
        self.clock.now += SECONDS_A_STEP
        places = self.places.look(self.core.scheduler)
        has_run = self.core.step()
        self.places.check(self.core.scheduler, places)
        self.core.check_invariants()
        self._check_events()
        if self.drafts is not None:
            self.drafts.check(self.executor.steps[self._num_watched :])
            self._num_watched = len(self.executor.steps)
            for output in self.core._in_handover.outputs:  # whose tokens may be drafts already
                self.drafts.answered(output)
        self._sort_replies()
        return has_run

    def run(self, max_steps: int = 10_000) -> None:
        """Step until no request is left. Fails if that takes too long: then one waits for ever."""
        for _ in range(max_steps):
            self.step()
            if not self.core.has_requests and not self.core.awaits_threads:
                while self.step():
                    pass  # what is in flight ends, and what was computed last goes to the tiers
                return
        raise AssertionError(f"requests still wait after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs[request_id] for t in output.new_token_ids]

    def pooled(self, request_id: str) -> bytes:
        return b"".join(output.pooled for output in self.outputs[request_id])

    def last(self, request_id: str) -> EngineOutput:
        return self.outputs[request_id][-1]

    def num_cached(self, request_id: str) -> int:
        return self.last(request_id).num_cached_tokens

    def _sort_replies(self) -> None:
        for reply in self.core.take_replies():
            if isinstance(reply, StepOutputs):
                for output in reply.outputs:
                    self._check_handover(output)
                    self.outputs.setdefault(output.request_id, []).append(output)
                    if self.drafts is not None:
                        self.drafts.answered(output)
            elif isinstance(reply, CallReply):
                self.calls[reply.call_id] = reply

    def _check_handover(self, output: EngineOutput) -> None:
        is_whole = output.finish_reason in ("stop", "length")
        tells = output.num_stored_tokens is not None
        assert tells == (is_whole and output.request_id in self._handed_over), output


def prompt_of(token_ids: Sequence[int], rows: Sequence[bytes] = ()) -> Prompt:
    """The prompt of tokens and of rows, which are empty where a token stands."""
    if not any(rows):
        return TokensPrompt(tuple(token_ids))
    if all(rows):
        return EmbedsPrompt(len(rows), b"".join(rows))
    parts: list[Sequence[int] | EmbedsPrompt] = []
    for place, token_id in enumerate(token_ids):
        row = rows[place] if place < len(rows) else b""
        parts.append(EmbedsPrompt(1, row) if row else [token_id])
    return MixedPrompt.of(parts)
