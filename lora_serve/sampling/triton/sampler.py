"""The next token of each row by Triton kernels: what `specification/` gives, to the bit.

Weights are whole numbers (`specification/weights.py`), whose sums have no order; all else is exact
or spelled out. What rows ask for goes to the device as one table; only tokens and the logprobs
asked for leave it, and only `wait` waits for them. Rows that change their logits are copied and
changed by torch before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.host_copies import to_device
from lora_serve.ops.triton.launch import Launch, Launcher, Machine
from lora_serve.sampling.logprobs_mode import RAW_LOGPROBS, LogprobsMode
from lora_serve.sampling.specification.philox import many_random_bits
from lora_serve.sampling.torch_device.adjust import adjust
from lora_serve.sampling.torch_device.output import (
    DeviceSamplerOutput,
    begin_output,
    token_logprobs_on_device,
)
from lora_serve.sampling.torch_device.processed import processed_rows
from lora_serve.sampling.triton.draw import (
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
from lora_serve.sampling.triton.filters import choose_launch, list_launch
from lora_serve.step import SampleInput, TokenLogprobs

Words = npt.NDArray[np.int64]

# Of which a list of keys lies in memory: 156 MB for a vocabulary of 151,936.
FILTERED_AT_ONCE = 128
CHANGED_AT_ONCE = 64  # whose entries are all counted: 39 MB for the same vocabulary


class TritonSampler:
    """The `Sampler` by kernels where the logits are."""

    def __init__(self, launcher: Launcher, mode: LogprobsMode = RAW_LOGPROBS) -> None:
        self._launcher = launcher
        self._mode = mode

    def sample(
        self,
        logits: Tensor,
        inputs: Sequence[SampleInput],
        pending_tokens: Tensor | None = None,
    ) -> DeviceSamplerOutput:
        logits = logits.contiguous()
        changing = [row for row, item in enumerate(inputs) if item.changes_logits]
        table = row_table(inputs, changing, logits.shape[1])
        rows = Rows(
            logits=logits,
            changed=_changed(logits, inputs, changing, pending_tokens),
            table=to_device(torch.from_numpy(table), logits.device),
            blocks=new_blocks(logits),
        )
        tokens = logits.new_empty(len(inputs), dtype=torch.int64)
        launches = sampling_launches(rows, table[:, HOW.value], tokens, self._launcher.machine)
        for launch in launches:
            self._launcher.run(launch)

        def process(some: Tensor, rows: Sequence[int], places: Tensor) -> Tensor:
            pending = None if pending_tokens is None else pending_tokens.index_select(0, places)
            return processed_rows(some, [inputs[row] for row in rows], pending)

        return begin_output(
            logits,
            tokens,
            [item.params.logprobs for item in inputs],
            process if self._mode.is_processed else None,
            as_logits=self._mode.is_logits,
            listed={
                row: item.params.logprob_token_ids
                for row, item in enumerate(inputs)
                if item.params.logprob_token_ids
            },
        )

    def token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        return token_logprobs_on_device(logits, token_ids, num_top, as_logits=self._mode.is_logits)


def load(launcher: object, mode: LogprobsMode = RAW_LOGPROBS) -> TritonSampler:
    assert isinstance(launcher, Launcher), f"not a launcher of Triton's kernels: {launcher}"
    return TritonSampler(launcher, mode)


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
    """changing: rows with logits of their own, in that order. See `draw` for the words."""
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
    pending_tokens: Tensor | None,
) -> Tensor:
    """Copies of these rows, in float32, with the changes that their requests ask for."""
    if not changing:
        return logits.new_empty(0, dtype=torch.float32)
    rows = logits.new_empty((len(changing), logits.shape[1]), dtype=torch.float32)
    for start in range(0, len(changing), CHANGED_AT_ONCE):
        some = changing[start : start + CHANGED_AT_ONCE]
        part = rows[start : start + CHANGED_AT_ONCE]
        places = to_device(torch.tensor(some), logits.device)
        part.copy_(logits.index_select(0, places))
        more = None if pending_tokens is None else pending_tokens.index_select(0, places)
        adjust(part, [inputs[row] for row in some], more)
    return rows
