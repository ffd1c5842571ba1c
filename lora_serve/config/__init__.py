"""What the user asked for: frozen parts, each the source of its command-line flags and their help.

What is found out at start (how many blocks, which end tokens) has its own types; nothing here
changes.
A field's metadata holds the one sentence of help; `cli/arguments.py` makes the flags.
"""

from lora_serve.config.cache import CacheConfig
from lora_serve.config.catalog import CatalogConfig
from lora_serve.config.engine import DraftModelConfig, EngineConfig
from lora_serve.config.fleet import FleetConfig
from lora_serve.config.kv_events import KVEventsConfig
from lora_serve.config.kv_tiers import KVTierConfig
from lora_serve.config.limits import LimitsConfig
from lora_serve.config.log import LogConfig
from lora_serve.config.lora import LoRAConfig
from lora_serve.config.model import ModelConfig
from lora_serve.config.parallel import ParallelConfig
from lora_serve.config.scheduler import SchedulerConfig
from lora_serve.config.server import ServerConfig
from lora_serve.config.speculative import SpeculativeConfig
from lora_serve.config.structured_outputs import StructuredOutputsConfig

__all__ = [
    "CacheConfig",
    "CatalogConfig",
    "DraftModelConfig",
    "EngineConfig",
    "FleetConfig",
    "KVEventsConfig",
    "KVTierConfig",
    "LimitsConfig",
    "LoRAConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
]
