"""Sampled tokens on their way to the host, with logprobs computed where the logits are.

This is `specification/logprobs.py` in torch, for all rows at once and the same to the bit: sums
are of whole numbers; maxima, ranks and selections are exact. How tokens are drawn is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lora_serve.host_copies import HostCopy, to_device, to_host
from lora_serve.sampling.contract import SampledToken
from lora_serve.sampling.specification.logprobs import log_sum_exp, logprob
from lora_serve.sampling.torch_device.comparable import comparable_rows
from lora_serve.sampling.torch_device.weights import largest, relative_weights, units
from lora_serve.step import TokenLogprobs

_ROWS_AT_ONCE = 64  # 80 MB of whole numbers for a vocabulary of 151,936, several times

Process = Callable[[Tensor, Sequence[int], Tensor], Tensor]  # places: on the host, and there

# Of some rows: token ids, their logits, ranks, peaks, total weights, top ids, their logits.
_Columns = tuple[Tensor, ...]


class DeviceSamplerOutput:
    """A `SamplerOutput` that is on its way to the host."""

    def __init__(
        self,
        token_ids: Tensor,
        num_tops: Mapping[int, int],
        columns: Sequence[_Columns],
        as_logits: bool,
    ) -> None:
        """num_tops: how many alternatives each row that asked gets; columns: of those rows."""
        self.token_ids = token_ids
        self._host_ids = to_host(token_ids)
        self._num_tops = num_tops
        self._as_logits = as_logits
        self._columns = [[to_host(column) for column in part] for part in columns]

    def wait(self) -> list[SampledToken]:
        logprobs = {
            row: TokenLogprobs(each.token_id, each.logprob, each.rank, each.top[:num_top])
            for (row, num_top), each in zip(
                self._num_tops.items(), _wait_for_all(self._columns, self._as_logits), strict=True
            )
        }
        tokens = self._host_ids.wait().tolist()
        return [(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def begin_output(
    logits: Tensor,
    tokens: Tensor,
    num_tops: Sequence[int | None],
    process: Process | None = None,
    *,
    as_logits: bool = False,
    listed: Mapping[int, Sequence[int]] | None = None,
) -> DeviceSamplerOutput:
    """Send tokens on their way, each with logprobs and so many alternatives, or without.

    tokens: (N), drawn from logits (N, V). process: makes of some rows of logits, and their places,
    those that are told. as_logits: tell logits instead. listed: of some rows the tokens that are
    told, as many as num_tops says, instead of the most likely.
    """
    asked = {row: num_top for row, num_top in enumerate(num_tops) if num_top is not None}
    columns: list[_Columns] = []
    rows, most = list(asked), max(asked.values(), default=0)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        places = to_device(torch.tensor(some), logits.device)
        own = tokens.index_select(0, places)
        told = logits.index_select(0, places)
        if process is not None:
            told = process(told, some, places)
        lists = [(listed or {}).get(row, ()) for row in some]
        columns.append(_some_columns(told, own, most, lists))
    return DeviceSamplerOutput(tokens, asked, columns, as_logits)


def token_logprobs_on_device(
    logits: Tensor, token_ids: Sequence[int], num_top: int, *, as_logits: bool = False
) -> list[TokenLogprobs]:
    """What `specification.logprobs.token_logprobs` gives."""
    tokens = to_device(torch.tensor(token_ids, dtype=torch.int64), logits.device)
    columns = [
        _some_columns(some, own, num_top)
        for some, own in zip(logits.split(_ROWS_AT_ONCE), tokens.split(_ROWS_AT_ONCE), strict=True)
    ]
    return _wait_for_all([[to_host(column) for column in part] for part in columns], as_logits)


def _some_columns(
    logits: Tensor, tokens: Tensor, num_top: int, lists: Sequence[Sequence[int]] = ()
) -> _Columns:
    """What the logprobs of M tokens (M) are made of, at their logits (M, V).

    lists: of each row the tokens that are told, or none for the most likely.
    """
    rows = comparable_rows(logits)
    own = rows.gather(1, tokens[:, None])
    ranks = 1 + (rows > own).sum(1)
    peaks = rows.amax(1, keepdim=True)
    flat = torch.where(peaks > -torch.inf, rows, 0.0)
    totals = units(relative_weights(flat, torch.ones_like(peaks))).sum(1)
    ids = largest(rows, num_top)
    if any(lists):
        ids = _with_lists(ids, lists)
    top = rows.gather(1, ids)
    return tokens, own[:, 0], ranks, peaks[:, 0], totals, ids, top


def _with_lists(ids: Tensor, lists: Sequence[Sequence[int]]) -> Tensor:
    """The ids (M, K), with a list's in its row; wider if a list is longer."""
    table = np.zeros((len(lists), max(ids.shape[1], *map(len, lists))), np.int64)
    for row, each in zip(table, lists, strict=True):
        row[: len(each)] = each
    is_listed = torch.tensor([[bool(each)] for each in lists])
    padded = torch.nn.functional.pad(ids, (0, table.shape[1] - ids.shape[1]))
    device = ids.device
    return torch.where(
        to_device(is_listed, device), to_device(torch.from_numpy(table), device), padded
    )


def _wait_for_all(columns: Sequence[Sequence[HostCopy]], as_logits: bool) -> list[TokenLogprobs]:
    """The logprobs of all rows, once they are there."""
    lists = ([column.wait().tolist() for column in part] for part in columns)
    return [_logprobs(as_logits, *figures) for part in lists for figures in zip(*part, strict=True)]


def _logprobs(
    as_logits: bool,
    token: int,
    logit: float,
    rank: int,
    peak: float,
    total: int,
    top_ids: list[int],
    top: list[float],
) -> TokenLogprobs:
    log_total = 0.0 if as_logits else log_sum_exp(peak, total)
    others = tuple((i, logprob(x, log_total)) for i, x in zip(top_ids, top, strict=True))
    return TokenLogprobs(token, logprob(logit, log_total), rank, others)
