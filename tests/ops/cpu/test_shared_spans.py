"""Decode attention of requests that share blocks is, to the bit, that of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lora_serve.ops._cpu import Backend, usable_paths
from lora_serve.ops.cpu.attention import CpuAttention
from lora_serve.ops.cpu.recording import Recorder

SPAN = 512  # csrc/cpu/attention_unit.h
NUM_BLOCKS = 600


@dataclass(frozen=True)
class Decode:
    """A step of one query for each request: their tables, and how many tokens each has."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    tables: Sequence[Sequence[int]]
    seq_lens: Sequence[int]
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def run(self, path: str, num_threads: int, rows: Sequence[int]) -> Tensor:
        """Attend with these requests in the step, in this order."""
        native = Backend(path, num_threads)
        attention = CpuAttention(native, Recorder(native))
        random = torch.Generator().manual_seed(1)
        cache = attention.new_kv_cache(
            NUM_BLOCKS, self.block_size, self.num_kv_heads, self.head_size, torch.bfloat16
        )
        cache.copy_(torch.randn(cache.shape, generator=random))
        q = torch.randn(len(self.tables), self.num_heads, self.head_size, generator=random)
        sinks = torch.randn(self.num_heads, generator=random) if self.has_sinks else None
        longest = max(len(self.tables[row]) for row in rows)
        tables = [[*self.tables[row], *[0] * (longest - len(self.tables[row]))] for row in rows]
        plan = attention.plan_attention(
            torch.arange(len(rows) + 1, dtype=torch.int32),
            torch.tensor([self.seq_lens[row] for row in rows], dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            self.block_size,
        )
        own = q[list(rows)].to(torch.bfloat16)
        scale = self.head_size**-0.5
        return attention.paged_attention(own, cache, plan, scale, self.window, self.softcap, sinks)


def tables_of(block_size: int, *branches: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Tables made of runs: (whose blocks, how many tokens)."""
    unused = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist())
    blocks: dict[tuple[int, int], int] = {}  # by owner and place
    found = []
    for branch in branches:
        table: list[int] = []
        for owner, tokens in branch:
            for _ in range(-(-tokens // block_size)):
                place = owner, len(table)
                if place not in blocks:
                    blocks[place] = next(unused)
                table.append(blocks[place])
        found.append(table)
    return found


def one_prefix(block_size: int, prefix: int, tails: Sequence[int]) -> list[list[int]]:
    branches = [[(0, prefix), (1 + i, tail)] for i, tail in enumerate(tails)]
    return tables_of(block_size, *branches)


# Two trees that part in their second span, one more that parts within its first, and one alone.
TREE = tables_of(
    16,
    [(0, 600), (1, 700)],
    [(0, 600), (2, 700)],
    [(0, 600), (1, 700)],
    [(0, 600), (2, 700)],
    [(0, 32), (3, 1000)],
    [(4, 1300)],
    [(0, 600)],
)
TREE_LENS = [1300, 1300, 1200, 1100, 1030, 1300, 600]

STEPS = [
    Decode(
        7, 1, 64, 16, one_prefix(16, 1536, [100, 1, 600, 16, 50]), [1600, 1537, 2100, 1540, 1540]
    ),
    Decode(4, 2, 32, 48, one_prefix(48, 1488, [48] * 20), [1500 + i for i in range(20)]),
    Decode(2, 2, 32, 16, TREE, TREE_LENS),
    Decode(2, 2, 32, 16, TREE, TREE_LENS, softcap=5.0, has_sinks=True),
    Decode(2, 1, 32, 16, TREE, TREE_LENS, window=700),
    Decode(4, 1, 32, 16, one_prefix(16, 1024, [16, 16]), [1024, 512]),
]


@pytest.mark.parametrize("path", usable_paths())
@pytest.mark.parametrize("step", STEPS)
def test_requests_that_share_blocks_answer_as_alone(path: str, step: Decode) -> None:
    rows = range(len(step.tables))
    alone = torch.cat([step.run(path, 1, [row]) for row in rows])
    for num_threads in (1, 3):
        assert torch.equal(step.run(path, num_threads, rows), alone)
    assert torch.equal(step.run(path, 2, rows[::-1]), alone.flip(0))
