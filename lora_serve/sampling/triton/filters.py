"""The drawn token of rows with top_k or top_p, without a sort.

Both filters keep the largest of some keys until they are so many, or sum to so much, and a draw
takes the lowest ids until their sum passes the random number. No two keys are equal, so each of the
three is one question: from which key on is a limit reached? It is answered by bisection over a list
of the row's most likely tokens. How many of them can matter is known before, from sums over levels
(`is_within`): it is those of the first level that reaches the limit. Order on the list is whatever
it is; sums of whole numbers do not depend on it.

    listed (filtered rows, VOCAB), int64: keys, first by logit, later by weight
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels
from lora_serve.sampling.triton.draw import (
    BLOCK_WORDS,
    CHANGED,
    FILTERED,
    LEAST,
    NUM_LEVELS,
    NUM_LISTED,
    NUM_WARPS,
    RANDOM,
    SCALE,
    TABLE_WORDS,
    TOP_K,
    TOP_P,
    TOTAL,
    Rows,
    is_within,
    row_peak,
    row_total,
)
from lora_serve.sampling.triton.weights import (
    ID_BITS,
    LAST_ID,
    float_in,
    id_of,
    logit_key,
    logit_of,
    read_logits,
    relative_weight,
    share_of,
    units,
    weight_key,
    weight_of,
)

KEYS_AT_ONCE = 4096
CHOOSE_WARPS = 16  # a row has one program, and keys come from the L2 cache: many on their way

# What is asked of a list: how many keys, which sum by weight, which sum by id.
COUNT, SUM_BY_WEIGHT, SUM_BY_ID = (tl.constexpr(i) for i in range(3))

# No key is as large as the one, or smaller than the other.
_ABOVE_ALL = tl.constexpr(1 << (31 + ID_BITS.value))
_LEAST = tl.constexpr(-(1 << (31 + ID_BITS.value)))


@triton.jit
def nucleus_limit(total, top_p_bits):
    """What top_p of a sum is, with the two roundings of the specification."""
    share = top_p_bits.to(tl.float64, bitcast=True) * total.to(tl.float64)
    return tl.maximum(share.to(tl.int64), 1)


@kernel()
def list_kernel(
    logits_ptr,
    changed_ptr,
    table_ptr,
    blocks_ptr,
    listed_ptr,
    first_filtered,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # Put the tokens on the list that lie within the first level which reaches the first filter's
    # limit, or all. One program per (block, filtered row from first_filtered on)
    wait_for_earlier_kernels(OVERLAPS)
    block = tl.program_id(0)
    place = tl.program_id(1)
    row = tl.load(table_ptr + (first_filtered + place) * TABLE_WORDS + FILTERED).to(tl.int32)
    ask = table_ptr + row * TABLE_WORDS
    row_blocks = blocks_ptr + row * NUM_BLOCKS * BLOCK_WORDS
    word = tl.arange(0, BLOCK_WORDS)
    sums = tl.zeros((BLOCK_WORDS,), tl.int64)
    for first in range(0, NUM_BLOCKS, BLOCKS_AT_ONCE):
        index = first + tl.arange(0, BLOCKS_AT_ONCE)[:, None]
        mask = (index < NUM_BLOCKS) & (word <= TOTAL)[None, :]
        ptrs = row_blocks + index * BLOCK_WORDS + word[None, :]
        sums += tl.sum(tl.load(ptrs, mask=mask, other=0), axis=0)
    total = tl.sum(tl.where(word == TOTAL, sums, 0), axis=0)
    top_k = tl.load(ask + TOP_K)
    by_logit = top_k > 0
    limit = tl.where(by_logit, top_k, nucleus_limit(total, tl.load(ask + TOP_P)))
    level = tl.sum(((word < NUM_LEVELS) & (sums < limit)).to(tl.int32), axis=0)

    peak = logit_of(row_peak(row_blocks, NUM_BLOCKS, BLOCKS_AT_ONCE))
    column = block * BLOCK + tl.arange(0, BLOCK)
    changed_row = tl.load(ask + CHANGED)
    logits = read_logits(logits_ptr, changed_ptr, row, changed_row, column, VOCAB)
    difference = logits - peak
    weight = relative_weight(
        difference, float_in(tl.load(ask + SCALE)), float_in(tl.load(ask + LEAST))
    )
    is_listed = column < VOCAB
    if level < NUM_LEVELS:
        is_listed = is_listed & is_within(difference, weight, by_logit, level)
    ones = is_listed.to(tl.int32)
    count = tl.sum(ones, axis=0)
    if count > 0:
        start = tl.atomic_add(row_blocks + NUM_LISTED, count.to(tl.int64))
        to = place.to(tl.int64) * VOCAB + start + tl.cumsum(ones, axis=0) - 1
        tl.store(listed_ptr + to, logit_key(logits, column), mask=is_listed)


@triton.jit
def reaching_key(list_ptr, length, floor, limit, WHAT: tl.constexpr, KEYS_AT_ONCE: tl.constexpr):
    """The largest key from which on the list reaches `limit`, or one below all if none does.

    Keys below `floor` count nothing. By id, keys are the ids' part of them.
    """
    # From `low` on the limit is reached, if it ever is; from `high` on it is not.
    low = tl.full((), _LEAST if WHAT == COUNT else -1, tl.int64)
    high = tl.full((), LAST_ID + 1 if WHAT == SUM_BY_ID else _ABOVE_ALL, tl.int64)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        sums = tl.zeros((KEYS_AT_ONCE,), tl.int64)
        above = tl.full((KEYS_AT_ONCE,), 0, tl.int64) + high
        below = tl.full((KEYS_AT_ONCE,), 0, tl.int64) + low
        for first in range(0, length, KEYS_AT_ONCE):
            index = first + tl.arange(0, KEYS_AT_ONCE)
            key = tl.load(list_ptr + index, mask=index < length, other=0)
            counts = (index < length) & (key >= floor)
            if WHAT == COUNT:
                value = tl.full((KEYS_AT_ONCE,), 1, tl.int64)
            else:
                value = units(weight_of(key))
            if WHAT == SUM_BY_ID:
                key = key & LAST_ID
            is_above = counts & (key >= middle)
            is_below = counts & (key < middle)
            sums += tl.where(is_above, value, 0)
            above = tl.where(is_above, tl.minimum(above, key), above)
            below = tl.where(is_below, tl.maximum(below, key), below)
        # Between two neighbours on the list there is nothing to ask.
        if tl.sum(sums, axis=0) >= limit:
            low = tl.min(above, axis=0)
        else:
            high = tl.max(below, axis=0) + 1
    return low


@triton.jit
def weigh_listed(list_ptr, length, floor, peak, scale, least, KEYS_AT_ONCE: tl.constexpr):
    """Make keys by logit keys by weight, which is 0 below `floor`; their sum of units."""
    sums = tl.zeros((KEYS_AT_ONCE,), tl.int64)
    for first in range(0, length, KEYS_AT_ONCE):
        index = first + tl.arange(0, KEYS_AT_ONCE)
        key = tl.load(list_ptr + index, mask=index < length, other=0)
        weight = relative_weight(logit_of(key) - peak, scale, least)
        weight = tl.where((index < length) & (key >= floor), weight, 0.0)
        tl.store(list_ptr + index, weight_key(weight, id_of(key)), mask=index < length)
        sums += units(weight)
    return tl.sum(sums, axis=0)


@triton.jit
def sum_listed(list_ptr, length, floor, KEYS_AT_ONCE: tl.constexpr):
    """Units of the keys by weight from `floor` on."""
    sums = tl.zeros((KEYS_AT_ONCE,), tl.int64)
    for first in range(0, length, KEYS_AT_ONCE):
        index = first + tl.arange(0, KEYS_AT_ONCE)
        key = tl.load(list_ptr + index, mask=index < length, other=0)
        sums += tl.where((index < length) & (key >= floor), units(weight_of(key)), 0)
    return tl.sum(sums, axis=0)


@kernel()
def choose_kernel(
    table_ptr,
    blocks_ptr,
    listed_ptr,
    tokens_ptr,
    first_filtered,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    KEYS_AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # A token of the listed ones: top_k, min_p, top_p, and the draw, in this order
    # One program per filtered row from first_filtered on
    wait_for_earlier_kernels(OVERLAPS)
    place = tl.program_id(0)
    row = tl.load(table_ptr + (first_filtered + place) * TABLE_WORDS + FILTERED).to(tl.int32)
    ask = table_ptr + row * TABLE_WORDS
    row_blocks = blocks_ptr + row * NUM_BLOCKS * BLOCK_WORDS
    greedy = row_peak(row_blocks, NUM_BLOCKS, BLOCKS_AT_ONCE)
    peak = logit_of(greedy)
    token = id_of(greedy)
    if peak > -float("inf"):
        list_ptr = listed_ptr + place.to(tl.int64) * VOCAB
        length = tl.load(row_blocks + NUM_LISTED).to(tl.int32)
        none = tl.full((), _LEAST, tl.int64)
        top_k = tl.load(ask + TOP_K)
        floor = none
        if top_k > 0:
            floor = reaching_key(list_ptr, length, none, top_k, COUNT, KEYS_AT_ONCE)

        tl.debug_barrier()  # what is written below was read by all of the program
        scale = float_in(tl.load(ask + SCALE))
        least = float_in(tl.load(ask + LEAST))
        total = weigh_listed(list_ptr, length, floor, peak, scale, least, KEYS_AT_ONCE)
        tl.debug_barrier()  # and is there for all
        if top_k == 0:  # what is not on the list counts, too
            total = row_total(row_blocks, NUM_BLOCKS, BLOCKS_AT_ONCE)
        top_p = tl.load(ask + TOP_P)
        floor = none
        if top_p.to(tl.float64, bitcast=True) < 1.0:
            limit = nucleus_limit(total, top_p)
            floor = reaching_key(list_ptr, length, none, limit, SUM_BY_WEIGHT, KEYS_AT_ONCE)
            total = sum_listed(list_ptr, length, floor, KEYS_AT_ONCE)
        target = share_of(total, tl.load(ask + RANDOM))
        token = id_of(reaching_key(list_ptr, length, floor, target + 1, SUM_BY_ID, KEYS_AT_ONCE))
    tl.store(tokens_ptr + row, token)


def list_launch(
    rows: Rows, listed: Tensor, first_filtered: int, num_filtered: int, machine: Machine
) -> Launch:
    """List num_filtered filtered rows from the first_filtered-th on. listed: room for them."""
    arguments: dict[str, Tensor | int | float] = {
        **rows.arguments,
        "listed_ptr": listed,
        "first_filtered": first_filtered,
    }
    grid = (rows.blocks.shape[1], num_filtered)
    return Launch(list_kernel, grid, arguments, rows.constants(machine), NUM_WARPS)


def choose_launch(
    rows: Rows,
    listed: Tensor,
    tokens: Tensor,
    first_filtered: int,
    num_filtered: int,
    machine: Machine,
) -> Launch:
    """Writes these rows' tokens, after list_launch."""
    arguments: dict[str, Tensor | int | float] = {
        "table_ptr": rows.table,
        "blocks_ptr": rows.blocks,
        "listed_ptr": listed,
        "tokens_ptr": tokens,
        "first_filtered": first_filtered,
    }
    constants = rows.constants(machine)
    del constants["BLOCK"]
    constants["KEYS_AT_ONCE"] = KEYS_AT_ONCE
    return Launch(choose_kernel, (num_filtered,), arguments, constants, CHOOSE_WARPS)
