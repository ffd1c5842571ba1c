"""The greedy token of each row, and the drawn one of rows that keep all tokens, or by min_p.

Rows are cut into blocks of the vocabulary: first each block's most likely token, then each block's
sum of weights, then the block in which the sum passes a row's random number, and the token there.

    table (rows, TABLE_WORDS), int64: what each row asks for. ask = a row's words
    blocks (rows, NUM_BLOCKS, BLOCK_WORDS), int64: what earlier kernels found in each block
    logits (rows, VOCAB), any float type; changed (changed rows, VOCAB), float32
    tokens (rows), int64
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels
from lora_serve.sampling.triton.weights import (
    float_in,
    id_of,
    logit_key,
    logit_of,
    read_logits,
    relative_weight,
    share_of,
    units,
)

BLOCK = 4096
BLOCKS_AT_ONCE = 64  # of which a program reads the sums
NUM_WARPS = 8

# A row's words. SCALE: 1 / temperature, and LEAST: min_p, both float32 in the lower half.
# TOP_K: 0 for all. TOP_P: the bits of a double. CHANGED: its row in `changed`, or -1.
# FILTERED: in the table's i-th row, the i-th row that is filtered.
HOW, RANDOM, SCALE, LEAST, TOP_K, TOP_P, CHANGED, FILTERED, TABLE_WORDS = (
    tl.constexpr(i) for i in range(9)
)
GREEDY, PLAIN, FILTERS = (tl.constexpr(i) for i in range(3))  # HOW

# A block's words: sums of what lies within each level (filters.py), and of all; the key of
# its most likely token; and, in a row's first block, how many tokens are listed.
NUM_LEVELS = tl.constexpr(13)
TOTAL, PEAK, NUM_LISTED = (tl.constexpr(NUM_LEVELS.value + i) for i in range(3))
BLOCK_WORDS = tl.constexpr(16)


@dataclass(frozen=True, slots=True)
class Rows:
    """What all kernels of a step are given; the names are those above."""

    logits: Tensor
    changed: Tensor
    table: Tensor
    blocks: Tensor

    @property
    def arguments(self) -> dict[str, Tensor]:
        return {
            "logits_ptr": self.logits,
            "changed_ptr": self.changed,
            "table_ptr": self.table,
            "blocks_ptr": self.blocks,
        }

    def constants(self, machine: Machine) -> dict[str, int | bool]:
        return {
            "VOCAB": self.logits.shape[1],
            "NUM_BLOCKS": self.blocks.shape[1],
            "BLOCK": BLOCK,
            "BLOCKS_AT_ONCE": BLOCKS_AT_ONCE,
            "OVERLAPS": machine.overlaps_launches,
        }


def new_blocks(logits: Tensor) -> Tensor:
    num_rows, vocab_size = logits.shape
    shape = (num_rows, triton.cdiv(vocab_size, BLOCK), BLOCK_WORDS.value)
    return logits.new_empty(shape, dtype=torch.int64)


@triton.jit
def row_peak(blocks_ptr, NUM_BLOCKS: tl.constexpr, BLOCKS_AT_ONCE: tl.constexpr):
    """The key of a row's greedy token; blocks_ptr: at the row's first block."""
    best = tl.load(blocks_ptr + PEAK)
    for first in range(0, NUM_BLOCKS, BLOCKS_AT_ONCE):
        block = first + tl.arange(0, BLOCKS_AT_ONCE)
        keys = tl.load(
            blocks_ptr + block * BLOCK_WORDS + PEAK, mask=block < NUM_BLOCKS, other=-(1 << 62)
        )
        best = tl.maximum(best, tl.max(keys, axis=0))
    return best


@triton.jit
def row_total(blocks_ptr, NUM_BLOCKS: tl.constexpr, BLOCKS_AT_ONCE: tl.constexpr):
    """The sum of a row's blocks' sums of all; blocks_ptr: at the row's first block."""
    total = tl.full((), 0, tl.int64)
    for first in range(0, NUM_BLOCKS, BLOCKS_AT_ONCE):
        block = first + tl.arange(0, BLOCKS_AT_ONCE)
        ptrs = blocks_ptr + block * BLOCK_WORDS + TOTAL
        total += tl.sum(tl.load(ptrs, mask=block < NUM_BLOCKS, other=0), axis=0)
    return total


@triton.jit
def is_within(difference, weight, by_logit, level):
    """Whether tokens are among the most likely: by logits, or by weights. Each level holds more.

    difference: logits less the row's largest.
    """
    distance = 1 + level + level * level // 12  # 1, 2, 3, 4, 6, 8, …, 25
    near = difference >= distance * -0.5
    heavy = weight.to(tl.int32, bitcast=True) >= (127 - distance) << 23  # 2**-distance
    return tl.where(by_logit, near, heavy)


@kernel()
def peak_kernel(
    logits_ptr,
    changed_ptr,
    table_ptr,
    blocks_ptr,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # One program per (block, row)
    wait_for_earlier_kernels(OVERLAPS)
    block = tl.program_id(0)
    row = tl.program_id(1)
    changed_row = tl.load(table_ptr + row * TABLE_WORDS + CHANGED)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logits = read_logits(logits_ptr, changed_ptr, row, changed_row, column, VOCAB)
    to = blocks_ptr + (row * NUM_BLOCKS + block) * BLOCK_WORDS
    tl.store(to + PEAK, tl.max(logit_key(logits, column), axis=0))
    tl.store(to + NUM_LISTED, tl.full((), 0, tl.int64))


@kernel()
def weigh_kernel(
    logits_ptr,
    changed_ptr,
    table_ptr,
    blocks_ptr,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # A block's sum of units, and of what lies within each level; with top_k, numbers of tokens
    # One program per (block, row)
    wait_for_earlier_kernels(OVERLAPS)
    block = tl.program_id(0)
    row = tl.program_id(1)
    ask = table_ptr + row * TABLE_WORDS
    how = tl.load(ask + HOW)
    if how != GREEDY:
        row_blocks = blocks_ptr + row * NUM_BLOCKS * BLOCK_WORDS
        peak = logit_of(row_peak(row_blocks, NUM_BLOCKS, BLOCKS_AT_ONCE))
        column = block * BLOCK + tl.arange(0, BLOCK)
        changed_row = tl.load(ask + CHANGED)
        logits = read_logits(logits_ptr, changed_ptr, row, changed_row, column, VOCAB)
        difference = logits - peak
        weight = relative_weight(
            difference, float_in(tl.load(ask + SCALE)), float_in(tl.load(ask + LEAST))
        )
        by_logit = tl.load(ask + TOP_K) > 0
        counted = tl.where(by_logit, (column < VOCAB).to(tl.int64), units(weight))
        to = row_blocks + block * BLOCK_WORDS
        tl.store(to + TOTAL, tl.sum(counted, axis=0))
        if how == FILTERS:
            for level in tl.static_range(NUM_LEVELS):
                inside = tl.where(is_within(difference, weight, by_logit, level), counted, 0)
                tl.store(to + level, tl.sum(inside, axis=0))


@kernel()
def draw_kernel(
    logits_ptr,
    changed_ptr,
    table_ptr,
    blocks_ptr,
    tokens_ptr,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # The greedy token, or where the sum of weights passes share_of(total, random)
    # One program per row; filtered rows are not its own
    wait_for_earlier_kernels(OVERLAPS)
    row = tl.program_id(0)
    ask = table_ptr + row * TABLE_WORDS
    how = tl.load(ask + HOW)
    row_blocks = blocks_ptr + row * NUM_BLOCKS * BLOCK_WORDS
    greedy = row_peak(row_blocks, NUM_BLOCKS, BLOCKS_AT_ONCE)
    peak = logit_of(greedy)
    is_drawn = (how == PLAIN) & (peak > -float("inf"))
    if (how != FILTERS) & (not is_drawn):
        tl.store(tokens_ptr + row, id_of(greedy))
    if is_drawn:
        total = row_total(row_blocks, NUM_BLOCKS, BLOCKS_AT_ONCE)
        target = share_of(total, tl.load(ask + RANDOM))
        # Blocks that end at or before the target
        before = tl.full((), 0, tl.int64)
        sum_so_far = tl.full((), 0, tl.int64)
        block = tl.full((), 0, tl.int32)
        for first in range(0, NUM_BLOCKS, BLOCKS_AT_ONCE):
            index = first + tl.arange(0, BLOCKS_AT_ONCE)
            ptrs = row_blocks + index * BLOCK_WORDS + TOTAL
            sums = tl.load(ptrs, mask=index < NUM_BLOCKS, other=0)
            is_passed = (sum_so_far + tl.cumsum(sums, axis=0) <= target) & (index < NUM_BLOCKS)
            block += tl.sum(is_passed.to(tl.int32), axis=0)
            before += tl.sum(tl.where(is_passed, sums, 0), axis=0)
            sum_so_far += tl.sum(sums, axis=0)
        column = block * BLOCK + tl.arange(0, BLOCK)
        changed_row = tl.load(ask + CHANGED)
        logits = read_logits(logits_ptr, changed_ptr, row, changed_row, column, VOCAB)
        weight = relative_weight(
            logits - peak, float_in(tl.load(ask + SCALE)), float_in(tl.load(ask + LEAST))
        )
        is_passed = before + tl.cumsum(units(weight), axis=0) <= target
        token = block * BLOCK + tl.sum(is_passed.to(tl.int32), axis=0)
        tl.store(tokens_ptr + row, token.to(tl.int64))


def peak_launch(rows: Rows, machine: Machine) -> Launch:
    return _launch_over_blocks(peak_kernel, rows, machine)


def weigh_launch(rows: Rows, machine: Machine) -> Launch:
    return _launch_over_blocks(weigh_kernel, rows, machine)


def _launch_over_blocks(block_kernel: object, rows: Rows, machine: Machine) -> Launch:
    num_rows, num_blocks, _ = rows.blocks.shape
    grid = (num_blocks, num_rows)
    return Launch(block_kernel, grid, rows.arguments, rows.constants(machine), NUM_WARPS)


def draw_launch(rows: Rows, tokens: Tensor, machine: Machine) -> Launch:
    """Writes the tokens of all rows that are not filtered."""
    return Launch(
        draw_kernel,
        (len(tokens),),
        {**rows.arguments, "tokens_ptr": tokens},
        rows.constants(machine),
        NUM_WARPS,
    )
