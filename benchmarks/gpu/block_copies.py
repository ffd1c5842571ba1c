"""KV blocks between the card and the host, as tiers ask for them; the limit is one plain copy.

By the host's clock: what is measured begins and ends there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.common.make_checkpoint import ModelShape
from benchmarks.gpu.kernels import BLOCK_SIZE, KernelTiming
from benchmarks.gpu.timing import TURNS, wait_for
from lora_serve.ops.block_rows import open_block_rows
from lora_serve.ops.contract import Ops

NUM_BLOCKS = 64  # of twice as many: a prompt of 1,024 tokens


def time_block_copies(ops: Ops, shape: ModelShape, dtype: torch.dtype) -> Iterator[KernelTiming]:
    """Copies all layers to pinned memory and back; the second with the copy into pinned memory."""
    device = ops.device
    caches = [
        ops.attention.new_kv_cache(
            2 * NUM_BLOCKS, BLOCK_SIZE, shape.num_key_value_heads, shape.head_dim, dtype
        )
        for _ in range(shape.num_hidden_layers)
    ]
    layers = [cache.zero_().view(2 * NUM_BLOCKS, -1).view(torch.uint8) for cache in caches]
    copier, block_ids = open_block_rows(layers), torch.randperm(2 * NUM_BLOCKS)[:NUM_BLOCKS]
    chosen = block_ids.tolist()
    rows = copier.read(chosen).rows()
    num_bytes = sum(map(len, rows))
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def timed(run: Callable[[], object]) -> float:
        return _seconds(run, device)

    for name, seconds, limit in (
        (
            f"{NUM_BLOCKS} KV blocks to the host",
            timed(lambda: copier.read(chosen)),
            timed(lambda: here.copy_(there, non_blocking=True)),
        ),
        (
            f"{NUM_BLOCKS} KV blocks from the host",
            timed(lambda: copier.write(chosen, rows)),
            timed(lambda: there.copy_(here, non_blocking=True)),
        ),
    ):
        yield KernelTiming(
            name=name,
            microseconds=seconds * 1e6,
            tflops=0.0,
            gb_per_second=num_bytes / seconds / 1e9,
            share=limit / seconds,
        )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of several runs, after one that finds its memory."""
    run()
    wait_for(device)
    times = []
    for _ in range(TURNS):
        begun = time.perf_counter()
        kept = run()
        wait_for(device)
        times.append(time.perf_counter() - begun)
        del kept
    return statistics.median(times)
