"""Sampling on the CPU: requests' choices in the form that csrc/cpu/sampling.h takes them.

Gives what `specification/` gives, to the bit. Knows nothing of how rows are walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lora_serve.ops._cpu import Backend, StepEdits
from lora_serve.ops.contract import TokenChoice
from lora_serve.ops.cpu.dtypes import dtype_code
from lora_serve.sampling.contract import SampledToken
from lora_serve.sampling.host import HostSamplerOutput, count_pending, token_choice
from lora_serve.sampling.logprobs_mode import RAW_LOGPROBS, LogprobsMode
from lora_serve.sampling.specification.logprobs import float_rows, log_sum_exp, logprob
from lora_serve.sampling.specification.processed import processed
from lora_serve.sampling.specification.top import comparable
from lora_serve.sampling.specification.weights import MAX_VOCAB_SIZE
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput, TokenLogprobs

_Choice = tuple[int, TokenChoice, int, StepEdits | None]  # as _cpu.pyi has it
_Sampled = tuple[int, float, float, int, int, list[tuple[int, float]]]


class NativeSampler:
    """The `Sampler` on the threads of the native kernels. One thread calls at a time."""

    def __init__(self, native: Backend, mode: LogprobsMode = RAW_LOGPROBS) -> None:
        self._native = native
        self._mode = mode

    def sample(
        self,
        logits: Tensor,
        inputs: Sequence[SampleInput],
        pending_tokens: Tensor | None = None,
    ) -> HostSamplerOutput:
        inputs = count_pending(inputs, pending_tokens)
        arrays: list[NDArray[np.generic]] = []  # alive until the rows are done
        choices = [_choice(item, arrays) for item in inputs]
        rows = self._rows(logits, choices)
        tokens: list[SampledToken] = [(row[0], None) for row in rows]
        for place, item in enumerate(inputs):
            if item.params.logprobs is not None:
                tokens[place] = rows[place][0], self._told(logits[place], item, rows[place])
        return HostSamplerOutput(tokens)

    def _told(self, logits: Tensor, item: SampleInput, row: _Sampled) -> TokenLogprobs:
        """The logprobs that a request asks for with its token. row: what drew that."""
        if item.params.logprob_token_ids or self._mode.changes(item, len(logits)):
            row = self._told_row(logits, item, row[0])
        return self._logprobs(row)

    def _told_row(self, logits: Tensor, item: SampleInput, token_id: int) -> _Sampled:
        """What is told of a drawn token by the row it was drawn from, or of listed others."""
        row, listed = float_rows(logits), item.params.logprob_token_ids
        if self._mode.changes(item, len(row)):
            with np.errstate(over="ignore"):
                row = processed(row, item)
        num_top = 0 if listed else item.params.logprobs
        assert num_top is not None
        told = self._rows(torch.from_numpy(row[None]), [_given(token_id, num_top)])[0]
        if not listed:
            return told
        row = comparable(row)
        return (*told[:5], [(i, float(row[i])) for i in listed])

    def token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        size = logits.shape[1]
        assert all(0 <= token_id < size for token_id in token_ids), f"ids beyond {size} tokens"
        choices = [_given(token_id, num_top) for token_id in token_ids]
        return [self._logprobs(row) for row in self._rows(logits, choices)]

    def _logprobs(self, row: _Sampled) -> TokenLogprobs:
        token_id, logit, peak, total, rank, top = row
        log_total = 0.0 if self._mode.is_logits else log_sum_exp(peak, total)
        return TokenLogprobs(
            token_id,
            logprob(logit, log_total),
            rank,
            tuple((i, logprob(other, log_total)) for i, other in top),
        )

    def _rows(self, logits: Tensor, choices: Sequence[_Choice]) -> list[_Sampled]:
        rows, size = logits.shape
        assert rows == len(choices), f"{rows} rows of logits for {len(choices)}"
        assert 0 < size <= MAX_VOCAB_SIZE, f"{size} logits in a row"
        logits = logits.contiguous()
        return self._native.sample(dtype_code(logits.dtype), logits.data_ptr(), size, choices)


def load(launcher: object, mode: LogprobsMode = RAW_LOGPROBS) -> NativeSampler:
    """launcher: the extension's own, with the threads of the other kernels."""
    native: Any = launcher
    return NativeSampler(native, mode)


def _given(token_id: int, num_top: int) -> _Choice:
    """Ask for the logprobs of a token that is there."""
    return token_id, TokenChoice(), num_top, None


def _choice(item: SampleInput, arrays: list[NDArray[np.generic]]) -> _Choice:
    params = item.params
    num_top = -1 if params.logprobs is None else params.logprobs
    return -1, token_choice(item), num_top, _edits(params, item, arrays)


def _edits(
    params: SamplingParams, item: SampleInput, arrays: list[NDArray[np.generic]]
) -> StepEdits | None:
    if not item.changes_logits:
        return None

    def address(values: ArrayLike, dtype: type[np.generic]) -> int:
        arrays.append(np.asarray(values, dtype))  # no copy of what has this type already
        return arrays[-1].ctypes.data

    def ids(values: Sequence[int] | NDArray[np.integer]) -> tuple[int, int]:
        return address(values, np.int64), len(values)

    bitmask = np.frombuffer(item.bitmask or b"", np.uint8)
    arrays.append(bitmask)
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return StepEdits(
        banned=ids(item.banned_token_ids),
        biased=ids(params.biased_token_ids),
        biases=address(params.biases, np.float32),
        prompt=ids(item.seen.token_ids),
        output=ids(np.repeat(item.seen.token_ids, item.seen.num_drawn)),
        penalties=penalties if params.has_penalties else None,
        bitmask=None if item.bitmask is None else (bitmask.ctypes.data, len(bitmask)),
    )
