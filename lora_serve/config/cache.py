"""The paged KV cache and the prefix cache over it."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import read_quantities, require_at_least, require_choices, setting
from lora_serve.errors import ConfigError
from lora_serve.identity import HASH_ALGOS


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache and the prefix cache over it."""

    block_size: int = setting("Tokens in one KV block; a multiple of 16.", 16)
    gpu_memory_utilization: float = setting(
        "Share of the device's free memory for weights, a step, adapters and KV.", 0.9
    )
    kv_cache_memory_bytes: int | None = setting(
        "Memory for the KV cache; on CPUs at most 4 GiB if left out.", None, quantity="bytes"
    )
    num_gpu_blocks_override: int | None = setting(
        "Exact number of KV blocks, on any device, instead of sizing by memory.", None
    )
    enable_prefix_caching: bool = setting("Reuse KV of equal prompt prefixes.", True)
    prefix_caching_hash_algo: str = setting(
        "Hash that identifies blocks; xxh3_128 is faster, for servers with one trusted tenant.",
        "sha256",
        choices=tuple(HASH_ALGOS),
    )

    def __post_init__(self) -> None:
        read_quantities(self)
        require_choices(self)
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError(f"--block-size {self.block_size} is not a multiple of 16")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization} must be in (0, 1]"
            )
        require_at_least(1, "--num-gpu-blocks-override", self.num_gpu_blocks_override)
        require_at_least(1, "--kv-cache-memory-bytes", self.kv_cache_memory_bytes)
