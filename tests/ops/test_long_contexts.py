"""Attention over 32,768 positions, by any number of threads and in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.cases import PagedCase, assert_close

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

LONG = 32_768
THREADS = (1, 2, 4)


def long_case(path: str, num_threads: int, dtype: torch.dtype, window: int | None) -> PagedCase:
    """One long request and two companions, whose KV but for the last tokens is in the cache."""
    case = PagedCase(
        cpu.load(path, num_threads),
        [LONG, 40, 5000],
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        dtype=dtype,
        window=window,
    )
    case.write([(0, 0, LONG - 9), (1, 0, 30), (2, 0, 4999)])
    return case


def last_tokens(case: PagedCase) -> Tensor:
    """Steps of the long request: two chunks, a decode alone, and three with others beside it."""
    chunks = case.step([(0, LONG - 9, LONG - 6)]) + case.step([(0, LONG - 6, LONG - 4)])
    alone = case.step([(0, LONG - 4, LONG - 3)])
    short = case.step([(1, 30, 31), (0, LONG - 3, LONG - 2)])[1:]
    both = case.step([(0, LONG - 2, LONG - 1), (2, 4999, 5000), (1, 31, 40)])[:1]
    return torch.cat((*chunks, *alone, *short, *both, *case.step([(0, LONG - 1, LONG)])))


@pytest.mark.parametrize("path", cpu.usable_paths())
@pytest.mark.parametrize("window", [None, 20_000])
def test_threads_companions_and_chunks_change_no_bit(
    path: str, dtype: torch.dtype, window: int | None
) -> None:
    """64 spans of one kv head: with more than one thread they are walked by all of them."""
    cases = [long_case(path, num_threads, dtype, window) for num_threads in THREADS]
    results = [last_tokens(case) for case in cases]
    assert_close(results[0], cases[0].exact(0, LONG - 9), dtype)
    for result, num_threads in zip(results, THREADS, strict=True):
        assert torch.equal(result, results[0]), f"{num_threads} threads"
    at_once = cases[-1].step([(2, 4999, 5000), (0, LONG - 9, LONG)])[1]
    assert torch.equal(at_once, results[0])
