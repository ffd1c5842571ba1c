"""All settings of an engine in one value, and the checks that concern several parts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from lora_serve.config.cache import CacheConfig
from lora_serve.config.kv_events import KVEventsConfig
from lora_serve.config.kv_tiers import KVTierConfig
from lora_serve.config.limits import LimitsConfig
from lora_serve.config.log import LogConfig
from lora_serve.config.lora import LoRAConfig
from lora_serve.config.model import ModelConfig
from lora_serve.config.parallel import ParallelConfig
from lora_serve.config.scheduler import SchedulerConfig
from lora_serve.config.speculative import SpeculativeConfig
from lora_serve.config.structured_outputs import StructuredOutputsConfig
from lora_serve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine; the server has its own part."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    kv_tiers: KVTierConfig = field(default_factory=KVTierConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.kv_events.is_enabled and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "--kv-events-config: events tell what the prefix cache holds, and "
                "--no-enable-prefix-caching leaves it empty; leave out one of them"
            )
        served = self.model.served_model_name or (self.model.model,)
        for name, _ in self.lora.modules:
            if any(name == base or name.startswith(f"{base}:") for base in served):
                raise ConfigError(
                    f"--lora-modules {name}: the model itself is served as {', '.join(served)}; "
                    "choose another name"
                )


def engine_parts() -> dict[str, type[Any]]:
    """The class of each part of an `EngineConfig`, by its name."""
    parts: dict[str, type[Any]] = {}
    for part in fields(EngineConfig):
        kind = part.default_factory
        assert isinstance(kind, type), f"{part.name} has no default"
        parts[part.name] = kind
    return parts
