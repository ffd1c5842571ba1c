from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_serve.config import CacheConfig
from lora_serve.errors import ConfigError
from lora_serve.models.source import load_spec
from lora_serve.ops.reference import REFERENCE
from lora_serve.worker.kv_cache import (
    CPU_DEFAULT_BYTES,
    allocate_kv_caches,
    available_memory_bytes,
    kv_block_bytes,
    num_kv_blocks,
)

GIB = 2**30


def size(cache: CacheConfig, *, needed: int = 10**9, available: int = 100 * GIB) -> int:
    """In blocks of one MiB."""
    return num_kv_blocks(cache, 2**20, needed, available)


def test_an_exact_number_is_taken_as_it_is() -> None:
    cache = CacheConfig(num_gpu_blocks_override=7, kv_cache_memory_bytes=GIB)
    assert size(cache, needed=3, available=0) == 7


def test_bytes_are_filled_with_whole_blocks() -> None:
    assert size(CacheConfig(kv_cache_memory_bytes=GIB + 5), needed=3, available=0) == 1024


def test_the_default_is_bounded_three_ways() -> None:
    cache = CacheConfig(gpu_memory_utilization=0.5)
    assert size(cache) == CPU_DEFAULT_BYTES // 2**20
    assert size(cache, available=2 * GIB) == 1024
    assert size(cache, needed=100) == 100


def test_a_pool_without_a_block_is_refused_with_what_one_takes() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 1000 .* takes 1048576 bytes"):
        size(CacheConfig(kv_cache_memory_bytes=1000))
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0\.9 of 1000 free"):
        size(CacheConfig(), available=1000)


def test_a_block_counts_all_layers_and_both_k_and_v(directories: dict[str, Path]) -> None:
    spec = load_spec(directories["qwen3"])
    values = spec.num_layers * 2 * spec.num_kv_heads * 32 * spec.head_size
    assert kv_block_bytes(spec, REFERENCE, 32, torch.bfloat16) == 2 * values


def test_there_is_one_cache_a_layer_with_blocks_first(directories: dict[str, Path]) -> None:
    caches = allocate_kv_caches(load_spec(directories["qwen3"]), REFERENCE, 5, 16, torch.float16)
    assert [cache.shape[0] for cache in caches] == [5, 5, 5]
    assert {cache.dtype for cache in caches} == {torch.float16}


def test_more_memory_than_there_is_is_refused(directories: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"no memory for 1000000000000 KV blocks .* lower"):
        allocate_kv_caches(load_spec(directories["qwen3"]), REFERENCE, 10**12, 16, torch.float32)


def test_some_memory_is_available() -> None:
    assert available_memory_bytes() > 2**20
