"""Puts an engine core together from what the config asks and what the model is."""

from __future__ import annotations

from collections.abc import Callable

from lora_serve.adapters.loader import make_loader
from lora_serve.adapters.manager import AdapterManager
from lora_serve.config import EngineConfig
from lora_serve.engine.core.core import EngineCore
from lora_serve.engine.core.executor import Executor
from lora_serve.engine.core.grammars import make_grammar_service
from lora_serve.engine.core.kv_event_publisher import EventPublisher
from lora_serve.engine.core.kv_events import make_events
from lora_serve.engine.core.kv_tiers import StaleVersions, make_connector
from lora_serve.engine.core.row_costs import make_row_costs
from lora_serve.engine.core.start import most_tokens_in_flight
from lora_serve.identity import BlockHasher
from lora_serve.kv.manager import KVCacheManager
from lora_serve.model_info import ModelInfo


def build_engine_core(
    config: EngineConfig,
    executor: Executor,
    model: ModelInfo,
    notify: Callable[[], None],
    publisher: EventPublisher | None = None,
) -> EngineCore:
    """Make the engine that `config` asks for.

    Args:
        model: what `executor.load` returned.
        notify: called from other threads when a load or a fetch has ended, to wake the thread that
            steps.
        publisher: of KV events, if `config` asks for them.
    """
    cache = config.cache
    loader = make_loader(config.lora, model, executor.prepare_adapter, notify)
    kv = KVCacheManager(
        model.num_blocks,
        cache.block_size,
        cache.enable_prefix_caching,
        model.kv_groups,
        most_tokens_in_flight(config, model),
    )
    hasher = BlockHasher(cache.prefix_caching_hash_algo)
    return EngineCore(
        config,
        executor,
        model,
        AdapterManager(config.lora, loader),
        kv,
        hasher,
        make_connector(config.kv_tiers, model, hasher, notify),
        StaleVersions(config.kv_tiers.kv_stale_version_seconds),
        make_grammar_service(config, model),
        None if publisher is None else make_events(config, model, publisher, notify),
        row_costs=make_row_costs(config, executor, model),
    )
