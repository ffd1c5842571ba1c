"""Which rows are whose in a step's native calls: the plans of attention and of LoRA.

The one rule: a native plan holds addresses, so it lives with the tensors, or adapters, that it
names. A recorded step's plan stays where it is, and is filled anew for each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lora_serve.ops._cpu import LoraAdapter, StepAttention, StepLora
from lora_serve.ops.recorded_steps import Int32Array


@dataclass(frozen=True, slots=True)
class LoraStep:
    """native is None when no row has an adapter."""

    native: StepLora | None


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The numbers whose addresses `native` holds, kept alive with it.

    arrays: to fill them by numpy, which takes a fraction of torch's time for so few.
    """

    native: StepAttention
    arrays: tuple[Int32Array, Int32Array, Int32Array]


def plan_lora(segments: Sequence[tuple[int, int, LoraAdapter]], num_tokens: int) -> LoraStep:
    end = 0
    for segment in segments:
        assert end <= segment[0] < segment[1] <= num_tokens, f"{segments} of {num_tokens} rows"
        end = segment[1]
    return LoraStep(StepLora(list(segments)) if segments else None)


def plan_attention(
    query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int
) -> AttentionStep:
    tensors = tuple(t.contiguous() for t in (query_start_loc, seq_lens, block_tables))
    assert all(t.dtype == torch.int32 for t in tensors), "plans are made of int32"
    starts, lens, tables = tensors
    requests, max_blocks = tables.shape
    longest = max(lens.tolist(), default=0)
    assert max_blocks * block_size >= longest, f"{max_blocks} blocks for {longest} tokens"
    native = StepAttention(
        starts.data_ptr(), lens.data_ptr(), tables.data_ptr(), requests, max_blocks
    )
    return AttentionStep(native, (starts.numpy(), lens.numpy(), tables.numpy()))


def new_attention_plan(
    num_rows: int, max_blocks: int, block_size: int, is_decode: bool
) -> AttentionStep:
    """Filled alike, whether or not every request has one row."""
    return plan_attention(
        torch.arange(num_rows + 1, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.zeros(num_rows, max_blocks, dtype=torch.int32),
        block_size,
    )


def fill_attention_plan(
    plan: AttentionStep,
    query_start_loc: Int32Array,
    seq_lens: Int32Array,
    block_tables: Int32Array,
) -> None:
    starts, lens, tables = plan.arrays
    requests, blocks = block_tables.shape
    starts[: requests + 1] = query_start_loc
    lens[:requests] = seq_lens
    tables[:requests, :blocks] = block_tables
    if requests < (padded := len(lens)):
        # Behind them one row of padding each, and none when all rows are had.
        num_rows = int(query_start_loc[-1])
        following = np.arange(num_rows + 1, num_rows + 1 + padded - requests)
        starts[requests + 1 :] = np.minimum(following, padded)
        lens[requests:] = 0


def new_lora_plan(num_rows: int) -> LoraStep:
    return LoraStep(StepLora([]))


def fill_lora_plan(plan: LoraStep, segments: Sequence[tuple[int, int, LoraAdapter]]) -> None:
    assert plan.native is not None, "a plan for recorded steps is never empty"
    plan.native.fill(list(segments))
