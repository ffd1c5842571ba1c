"""How many KV blocks there are, and their memory. Knows nothing of what blocks hold."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from lora_serve.config import CacheConfig
from lora_serve.errors import ConfigError
from lora_serve.models.spec import DecoderSpec
from lora_serve.ops import Ops

CPU_DEFAULT_BYTES = 4 * 2**30


def allocate_kv_caches(
    spec: DecoderSpec, ops: Ops, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[Tensor]:
    """One cache a layer, uninitialised: kernels read no slot that was not written.

    Raises:
        ConfigError: when the machine does not give so much memory.
    """
    try:
        return [
            ops.new_kv_cache(num_blocks, block_size, spec.num_kv_heads, spec.head_size, dtype)
            for _ in range(spec.num_layers)
        ]
    except (RuntimeError, MemoryError) as error:  # torch's allocator raises the first
        raise ConfigError(
            f"no memory for {num_blocks} KV blocks of {block_size} tokens: {error}; lower "
            "--num-gpu-blocks-override or --kv-cache-memory-bytes"
        ) from error


def kv_block_bytes(spec: DecoderSpec, ops: Ops, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, in this backend's layout."""
    return sum(cache.nbytes for cache in allocate_kv_caches(spec, ops, 1, block_size, dtype))


def num_kv_blocks(
    cache: CacheConfig, block_bytes: int, most_needed: int, available_bytes: int
) -> int:
    """Size of the pool.

    Args:
        cache: an exact number of blocks, or of bytes, if the user set one.
        block_bytes: from `kv_block_bytes`.
        most_needed: blocks that all seats with the longest prompts take, which bounds the default.
        available_bytes: free memory, of which the default takes gpu_memory_utilization at most.

    Raises:
        ConfigError: when not one block fits.
    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        num_blocks = cache.kv_cache_memory_bytes // block_bytes
        limit = f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}"
    else:
        share = int(available_bytes * cache.gpu_memory_utilization)
        num_blocks = min(min(share, CPU_DEFAULT_BYTES) // block_bytes, most_needed)
        limit = (
            f"--gpu-memory-utilization {cache.gpu_memory_utilization} of {available_bytes} free "
            "bytes"
        )
    if num_blocks < 1:
        raise ConfigError(
            f"{limit} holds no KV block, which takes {block_bytes} bytes; raise it or lower "
            f"--block-size {cache.block_size}"
        )
    return num_blocks


def available_memory_bytes() -> int:
    """Memory this process may still take: the machine's, or its control group's if that is less."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free
