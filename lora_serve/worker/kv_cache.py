"""How many KV blocks there are, and their memory. Knows nothing of what blocks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.config import CacheConfig
from lora_serve.errors import ConfigError
from lora_serve.models.base import KVSpec
from lora_serve.ops.contract import Ops
from lora_serve.worker.memory import Room


def allocate_kv_caches(
    cache_specs: Sequence[KVSpec], ops: Ops, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[Tensor]:
    """A cache for each of the specs, uninitialised: kernels read no slot that was not written.

    Raises:
        ConfigError: when the machine does not give so much memory.
    """
    try:
        return [
            ops.attention.new_kv_cache(
                num_blocks, block_size, spec.num_kv_heads, spec.head_size, dtype
            )
            for spec in cache_specs
        ]
    except (RuntimeError, MemoryError) as error:  # torch's allocator raises the first
        raise ConfigError(
            f"no memory for {num_blocks} KV blocks of {block_size} tokens: {error}; lower "
            "--num-gpu-blocks-override or --kv-cache-memory-bytes"
        ) from error


def kv_block_bytes(
    cache_specs: Sequence[KVSpec], ops: Ops, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all caches, in this backend's layout."""
    return sum(cache.nbytes for cache in allocate_kv_caches(cache_specs, ops, 1, block_size, dtype))


@dataclass(frozen=True, slots=True)
class DraftBlocks:
    """What the blocks of a draft model's pool take, and how many there can be a use for.

    Of its own pool a draft model gets as many blocks as the model that is served, up to `most`.
    """

    block_bytes: int = 0
    most: int = 0

    def num_blocks(self, num_kv_blocks: int) -> int:
        return min(num_kv_blocks, self.most)

    def num_kv_blocks(self, room_bytes: int, block_bytes: int) -> int:
        """How many blocks of the served model fit, beside as many of these as go with them."""
        num_blocks = room_bytes // (block_bytes + self.block_bytes)
        if num_blocks <= self.most:
            return num_blocks
        return (room_bytes - self.most * self.block_bytes) // block_bytes


NO_DRAFT_BLOCKS = DraftBlocks()


def num_kv_blocks(
    cache: CacheConfig,
    block_bytes: int,
    find_room: Callable[[], Room],
    draft: DraftBlocks = NO_DRAFT_BLOCKS,
) -> int:
    """Size of the pool.

    Args:
        cache: an exact number of blocks, or of bytes, if the user set one.
        block_bytes: from `kv_block_bytes`.
        find_room: tells what there is; only asked if the user set neither, for it may measure.
        draft: the draft model's pool, which has to fit, too.

    Raises:
        ConfigError: when not one block fits.
    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        limit = f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}"
        room = Room(cache.kv_cache_memory_bytes, limit)
    else:
        room = find_room()
    num_blocks = draft.num_kv_blocks(room.num_bytes, block_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"{room.told} holds no KV block, which takes {block_bytes + draft.block_bytes} bytes; "
            f"raise it or lower --block-size {cache.block_size}"
        )
    return num_blocks
