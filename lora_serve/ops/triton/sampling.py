"""The next token of each row by kernels, and the same as `sampling/sampler.py` to the bit.

Weights are whole numbers (`sampling/weights.py`), whose sums have no order; all else is exact or
spelled out. What rows ask for goes to the device as one table; only tokens and the logprobs asked
for leave it, and only who asks for them waits. Rows that change their logits are copied and changed
by torch before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.host_copies import to_device
from lora_serve.ops.triton.launch import Launch, Machine, Run
from lora_serve.ops.triton.sampling_draw import (
    CHANGED,
    FILTERED,
    FILTERS,
    HOW,
    LEAST,
    PLAIN,
    RANDOM,
    SCALE,
    TABLE_WORDS,
    TOP_K,
    TOP_P,
    Rows,
    draw_launch,
    new_blocks,
    peak_launch,
    weigh_launch,
)
from lora_serve.ops.triton.sampling_filters import choose_launch, list_launch
from lora_serve.sampling.device_adjust import adjust
from lora_serve.sampling.device_draws import DeviceDraws, begin_telling
from lora_serve.sampling.philox import many_random_bits
from lora_serve.step import SampleInput

Words = npt.NDArray[np.int64]

# Of which a list of keys lies in memory: 156 MB for a vocabulary of 151,936.
FILTERED_AT_ONCE = 128
CHANGED_AT_ONCE = 64  # whose entries are all counted: 39 MB for the same vocabulary


def begin_sampling(
    logits: Tensor,
    inputs: Sequence[SampleInput],
    uncounted: Tensor | None,
    machine: Machine,
    run: Run,
) -> DeviceDraws:
    """As Ops.begin_sampling."""
    logits = logits.contiguous()
    changing = [row for row, item in enumerate(inputs) if item.changes_logits]
    table = row_table(inputs, changing, logits.shape[1])
    rows = Rows(
        logits=logits,
        changed=_changed(logits, inputs, changing, uncounted),
        table=to_device(torch.from_numpy(table), logits.device),
        blocks=new_blocks(logits),
    )
    tokens = logits.new_empty(len(inputs), dtype=torch.int64)
    for launch in sampling_launches(rows, table[:, HOW.value], tokens, machine):
        run(launch)
    return begin_telling(logits, tokens, [item.params.logprobs for item in inputs])


def sampling_launches(rows: Rows, how: Words, tokens: Tensor, machine: Machine) -> Iterator[Launch]:
    """how: of each row, as its table has it on the device."""
    yield peak_launch(rows, machine)
    if how.any():
        yield weigh_launch(rows, machine)
    yield draw_launch(rows, tokens, machine)
    num_filtered = int(np.count_nonzero(how == FILTERS.value))
    if num_filtered:
        at_once = min(num_filtered, FILTERED_AT_ONCE)
        listed = rows.blocks.new_empty((at_once, rows.logits.shape[1]))
        for first in range(0, num_filtered, at_once):
            count = min(at_once, num_filtered - first)
            yield list_launch(rows, listed, first, count, machine)
            yield choose_launch(rows, listed, tokens, first, count, machine)


def row_table(inputs: Sequence[SampleInput], changing: Sequence[int], vocab_size: int) -> Words:
    """changing: rows with logits of their own, in that order. See `sampling_draw` for the words."""
    table = np.zeros((len(inputs), TABLE_WORDS.value), np.int64)
    table[:, CHANGED.value] = -1
    table[changing, CHANGED.value] = np.arange(len(changing))
    drawing = [row for row, item in enumerate(inputs) if not item.params.is_greedy]
    if not drawing:
        return table
    params = [inputs[row].params for row in drawing]
    asked = np.array([(p.temperature, p.min_p, p.top_p, p.top_k) for p in params], np.float64)
    top_k = asked[:, 3].astype(np.int64)
    top_k[(top_k < 0) | (top_k >= vocab_size)] = 0
    is_filtered = (top_k > 0) | (asked[:, 2] < 1)
    words = np.empty((len(drawing), TABLE_WORDS.value), np.int64)
    words[:, HOW.value] = np.where(is_filtered, FILTERS.value, PLAIN.value)
    words[:, RANDOM.value] = many_random_bits(
        [inputs[row].seed for row in drawing], [inputs[row].position for row in drawing]
    )
    words[:, SCALE.value] = (1 / asked[:, 0]).astype(np.float32).view(np.int32)
    words[:, LEAST.value] = asked[:, 1].astype(np.float32).view(np.int32)
    words[:, TOP_P.value] = asked[:, 2].copy().view(np.int64)
    words[:, TOP_K.value] = top_k
    words[:, CHANGED.value] = table[drawing, CHANGED.value]
    table[drawing] = words
    filtered = np.flatnonzero(table[:, HOW.value] == FILTERS.value)
    table[: len(filtered), FILTERED.value] = filtered
    return table


def _changed(
    logits: Tensor,
    inputs: Sequence[SampleInput],
    changing: Sequence[int],
    uncounted: Tensor | None,
) -> Tensor:
    """Copies of these rows, in float32, as their requests want them."""
    if not changing:
        return logits.new_empty(0, dtype=torch.float32)
    rows = logits.new_empty((len(changing), logits.shape[1]), dtype=torch.float32)
    for start in range(0, len(changing), CHANGED_AT_ONCE):
        some = changing[start : start + CHANGED_AT_ONCE]
        part = rows[start : start + CHANGED_AT_ONCE]
        places = to_device(torch.tensor(some), logits.device)
        part.copy_(logits.index_select(0, places))
        more = None if uncounted is None else uncounted.index_select(0, places)
        adjust(part, [inputs[row] for row in some], more)
    return rows
