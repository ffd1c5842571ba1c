"""All settings of an engine in one value, and the checks that concern several parts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from lora_serve.config.cache import CacheConfig
from lora_serve.config.kv_events import KVEventsConfig
from lora_serve.config.kv_tiers import KVTierConfig
from lora_serve.config.limits import LimitsConfig
from lora_serve.config.log import LogConfig
from lora_serve.config.lora import LoRAConfig
from lora_serve.config.model import AUTO, RANDOM_WEIGHTS, TRANSFORMERS_IMPL, ModelConfig
from lora_serve.config.overrides import REFERENCE, backend_of, refuse_reference_sums
from lora_serve.config.parallel import ParallelConfig
from lora_serve.config.scheduler import SchedulerConfig
from lora_serve.config.speculative import DRAFT_MODEL, TOKENS_TAKEN_IN, SpeculativeConfig
from lora_serve.config.structured_outputs import StructuredOutputsConfig
from lora_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """max_requests: that it drafts for at once. max_step_tokens: that it computes at once."""

    model: ModelConfig
    max_requests: int
    max_step_tokens: int


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
        self._check_ranks()
        served = self.model.served_model_name or (self.model.model,)
        for name, _ in self.lora.modules:
            if any(name == base or name.startswith(f"{base}:") for base in served):
                raise ConfigError(
                    f"--lora-modules {name}: the model itself is served as {', '.join(served)}; "
                    "choose another name"
                )

    def _check_ranks(self) -> None:
        size = self.parallel.tensor_parallel_size
        if size == 1:
            return
        if REFERENCE in map(backend_of, self.model.override_op):
            raise refuse_reference_sums(size)
        if self.model.model_impl == TRANSFORMERS_IMPL:
            raise ConfigError(
                f"--tensor-parallel-size {size} does not go with --model-impl {TRANSFORMERS_IMPL}, "
                "whose modules are not divided among ranks; leave out one of them"
            )

    @property
    def draft_model(self) -> DraftModelConfig | None:
        """The model that drafts, computed as the model that is served; None where none does."""
        speculative, served = self.speculative, self.model
        if speculative.method != DRAFT_MODEL:
            return None
        assert speculative.speculative_model is not None, "a draft model without a name"
        is_random = served.load_format == RANDOM_WEIGHTS
        model = replace(
            served,
            model=speculative.speculative_model,
            tokenizer=None,
            revision=speculative.speculative_revision,
            quantization=speculative.speculative_quantization,
            quantize_activations=False,
            load_format=RANDOM_WEIGHTS if is_random else AUTO,
            max_model_len=None,
            model_impl=AUTO,
        )
        max_step_tokens = max(TOKENS_TAKEN_IN, self.scheduler.max_num_batched_tokens)
        max_step_tokens += speculative.max_draft_rows + speculative.max_drafters  # those drawn
        return DraftModelConfig(model, speculative.max_drafters, max_step_tokens)


def engine_parts() -> dict[str, type[Any]]:
    """The class of each part of an `EngineConfig`, by its name."""
    parts: dict[str, type[Any]] = {}
    for part in fields(EngineConfig):
        kind = part.default_factory
        assert isinstance(kind, type), f"{part.name} has no default"
        parts[part.name] = kind
    return parts
