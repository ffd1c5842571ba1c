"""One replica: a real EngineCore whose executor, threads and clock are simulated.

Its turns follow the loop of the engine process (`engine/core/process.py`): tell what the last step
gave, take in all messages, step. The next turn comes when the step has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lora_serve.adapters.manager import AdapterManager
from lora_serve.config import CacheConfig, EngineConfig, LoRAConfig, SchedulerConfig
from lora_serve.engine.core.core import EngineCore
from lora_serve.engine.core.kv_tiers import StaleVersions
from lora_serve.engine.core.start import most_tokens_in_flight
from lora_serve.engine_stats import EngineStats
from lora_serve.identity import BlockHasher
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv_groups import KVGroup
from lora_serve.messages import EngineMessage, EngineReply
from lora_serve.model_info import ModelInfo
from lora_serve.simulate.adapters import make_loader, name_of
from lora_serve.simulate.cores import Cores
from lora_serve.simulate.costs import Costs, EngineSettings
from lora_serve.simulate.deviations import Deviations
from lora_serve.simulate.events import EventQueue
from lora_serve.simulate.executor import ReplicaClock, SimulatedExecutor
from lora_serve.simulate.frontend import Frontend
from lora_serve.simulate.grammars import NoGrammars

OnReplies = Callable[[Sequence[EngineReply]], None]
STALE_SECONDS = 0.0  # the KV of a replaced version lies in no tier


class Replica:
    """on_replies: called when a step has ended, at the end's time, with what it gave.

    seed: of its steps' deviations. frontend: what its requests and tokens pass through.
    """

    def __init__(
        self,
        settings: EngineSettings,
        costs: Costs,
        events: EventQueue,
        on_replies: OnReplies,
        seed: str = "",
    ) -> None:
        self._events = events
        self._on_replies = on_replies
        self._inbox: list[EngineMessage] = []
        self._told: list[EngineReply] = []  # to be told at the next turn
        self._has_turn = False
        self._clock = ReplicaClock()
        cores = Cores(costs.machine.num_cores, events)
        self.frontend = Frontend(costs, cores, events)
        self.executor = SimulatedExecutor(
            costs.seconds_of,
            Deviations(costs.ratios, seed),
            self._clock,
            cores.worker(costs.processes.engine_threads),
        )
        self.core = self._core(settings, costs, cores)

    def send(self, message: EngineMessage) -> None:
        """Have the engine take in a message when the step that it is at has ended."""
        self._inbox.append(message)
        self._wake()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def adapters(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of adapters that run now, and of the others that are in memory."""
        running = frozenset(ref.name for ref in self.core.scheduler.running_adapters)
        resident = map(name_of, self.core.adapters.resident_digests)
        return running, frozenset(resident) - running

    def _wake(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._events.at(self._events.now, self._turn)

    def _turn(self) -> None:
        self._has_turn = False
        self._tell()
        inbox, self._inbox = self._inbox, []
        self._clock.now = begin = self._events.now
        for message in inbox:
            self.core.handle(message)
        self.executor.collected = None
        has_run = self.core.step()
        self._told = self.core.take_replies()
        collected = self.executor.collected
        if has_run or collected is not None:
            self._has_turn = True
            if collected is None or not collected.when_ended(self._turn):
                self._events.at(begin, self._turn)
            return
        self._tell()
        nap = self.core.idle_seconds
        if nap is not None:  # the sum may round to a moment before, or to this one
            self._events.at(max(begin + nap, math.nextafter(begin, math.inf)), self._wake)

    def _tell(self) -> None:
        told, self._told = self._told, []
        if told:
            self._on_replies(told)

    def _core(self, settings: EngineSettings, costs: Costs, cores: Cores) -> EngineCore:
        config = engine_config(settings)
        model = model_info(settings)
        kv = KVCacheManager(
            settings.num_blocks,
            settings.block_size,
            settings.enable_prefix_caching,
            model.kv_groups,
            most_tokens_in_flight(config, model),
        )
        loader = make_loader(config.lora, costs, cores, self._events, self._clock, self._wake)
        return EngineCore(
            config,
            self.executor,
            model,
            AdapterManager(config.lora, loader, self._clock),
            kv,
            BlockHasher("xxh3_128"),  # which hash it is changes no decision
            KVConnector(),
            StaleVersions(STALE_SECONDS, self._clock),
            NoGrammars(),
            clock=self._clock,
        )


def engine_config(settings: EngineSettings) -> EngineConfig:
    """Raises ConfigError for what a server refuses, too."""
    return EngineConfig(
        cache=CacheConfig(
            block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            fair_share=settings.fair_share,
        ),
        lora=LoRAConfig(
            enable_lora=True, max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras
        ),
    )


def model_info(settings: EngineSettings) -> ModelInfo:
    return ModelInfo(
        fingerprint=b"simulated",
        dtype="",
        vocab_size=0,
        hidden_size=0,
        max_model_len=settings.max_model_len,
        num_blocks=settings.num_blocks,
        kernels="",
        kv_groups=tuple(KVGroup(window) for window in settings.windows),
        is_asynchronous=settings.is_asynchronous,
    )
