"""Timing kernels against what the machine can do in the same moment.

The one rule: a kernel and the limits are run in turns, many short times, and the best of each
counts, so that a neighbour on the machine slows both or neither.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from benchmarks.speed.kernels.work import Work
from lora_serve.ops._cpu import Backend, use_huge_pages

MULTIPLY_ROUNDS = 20_000  # 2 ms
BEYOND_CACHES = 512 << 20  # the largest that was met has 300 MiB
READ_BYTES = BEYOND_CACHES
TURNS = 8
CALLS_A_TURN = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """Against what the limits would allow: arithmetic at full rate or memory read once.

    share: the time that the nearer limit asks for, of the time taken. Above 1 where what is not a
    weight, such as the KV of short prompts, stays in a cache from one call to the next.
    """

    name: str
    microseconds: float
    gflops: float
    gb_per_second: float
    limit_gflops: float
    limit_gb_per_second: float
    share: float


def huge_buffer() -> torch.Tensor:
    """READ_BYTES of written memory in large pages, as weights lie."""
    buffer = torch.empty(READ_BYTES // 4)
    use_huge_pages(buffer.data_ptr(), READ_BYTES)
    return buffer.zero_()


def num_copies(num_bytes: float) -> int:
    """How many weights of a size must take turns for none to be found in a cache."""
    return max(1, math.ceil(BEYOND_CACHES / num_bytes))


def in_turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One call that does the next of `calls` each time, as a model's layers follow each other."""
    following = cycle(calls)
    return lambda: next(following)()


def measure(work: Work, backend: Backend, dtype_code: int, buffer: torch.Tensor) -> Timing:
    flops = 0

    def multiply() -> None:
        nonlocal flops
        flops = backend.multiply_only(dtype_code, MULTIPLY_ROUNDS)

    def read() -> None:
        backend.read_only(buffer.data_ptr(), READ_BYTES)

    best = dict.fromkeys((multiply, read, work.run), float("inf"))
    for _ in range(TURNS):
        for run in (multiply, read, *[work.run] * CALLS_A_TURN):
            start = time.perf_counter()
            run()
            best[run] = min(best[run], time.perf_counter() - start)
    seconds = best[work.run]
    limit_flops, limit_bytes = flops / best[multiply], READ_BYTES / best[read]
    needed = max(work.flops / limit_flops, work.num_bytes / limit_bytes)
    return Timing(
        name=work.name,
        microseconds=seconds * 1e6,
        gflops=work.flops / seconds / 1e9,
        gb_per_second=work.num_bytes / seconds / 1e9,
        limit_gflops=limit_flops / 1e9,
        limit_gb_per_second=limit_bytes / 1e9,
        share=needed / seconds,
    )
