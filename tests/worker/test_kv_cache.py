from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_serve.config import CacheConfig
from lora_serve.errors import ConfigError
from lora_serve.models.source import load_spec
from lora_serve.ops.reference import REFERENCE
from lora_serve.worker.kv_cache import (
    allocate_kv_caches,
    kv_block_bytes,
    num_kv_blocks,
)
from lora_serve.worker.memory import Room

GIB = 2**30


def size(cache: CacheConfig, room_bytes: int = 0) -> int:
    """How many blocks of one MiB."""
    return num_kv_blocks(cache, 2**20, lambda: Room(room_bytes, "the room"))


def never() -> Room:
    raise AssertionError("memory should not have been looked at")


def test_what_the_user_set_is_taken_without_looking_for_room() -> None:
    both = CacheConfig(num_gpu_blocks_override=7, kv_cache_memory_bytes=GIB)
    assert num_kv_blocks(both, 2**20, never) == 7
    assert num_kv_blocks(CacheConfig(kv_cache_memory_bytes=GIB + 5), 2**20, never) == 1024


def test_the_room_that_is_found_is_filled_with_whole_blocks() -> None:
    assert size(CacheConfig(), 3 * 2**20 + 5) == 3


def test_a_pool_without_a_block_is_refused_with_what_one_takes() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 1000 .* takes 1048576 bytes"):
        size(CacheConfig(kv_cache_memory_bytes=1000))
    with pytest.raises(ConfigError, match="the room holds no KV block"):
        size(CacheConfig(), 2**20 - 1)


def test_a_block_counts_all_layers_and_both_k_and_v(directories: dict[str, Path]) -> None:
    specs = load_spec(directories["qwen3"]).kv_specs()
    values = sum(2 * spec.num_kv_heads * 32 * spec.head_size for spec in specs)
    assert kv_block_bytes(specs, REFERENCE, 32, torch.bfloat16) == 2 * values


def test_there_is_one_cache_a_layer_with_blocks_first(directories: dict[str, Path]) -> None:
    specs = load_spec(directories["qwen3"]).kv_specs()
    caches = allocate_kv_caches(specs, REFERENCE, 5, 16, torch.float16)
    assert [cache.shape[0] for cache in caches] == [5, 5, 5]
    assert {cache.dtype for cache in caches} == {torch.float16}


def test_more_memory_than_there_is_is_refused(directories: dict[str, Path]) -> None:
    specs = load_spec(directories["qwen3"]).kv_specs()
    with pytest.raises(ConfigError, match=r"no memory for 1000000000000 KV blocks .* lower"):
        allocate_kv_caches(specs, REFERENCE, 10**12, 16, torch.float32)
