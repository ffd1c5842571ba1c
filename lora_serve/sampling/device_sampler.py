"""The next token of each row where the logits are: `sampler.py` in torch, for all rows at once.

That file is the specification, and this one gives the same to the bit: weights are whole numbers
(`weights.py`), whose sums have no order; maxima, ranks and selections are exact; and the
exponential is spelled out in the same element-wise operations. Only tokens and the logprobs asked
for leave the device, and only who asks for them waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lora_serve.host_copies import HostCopy, to_device, to_host
from lora_serve.sampling.device_adjust import adjust
from lora_serve.sampling.device_weights import largest, relative_weights, share_of, units
from lora_serve.sampling.logprobs import log_sum_exp, logprob
from lora_serve.sampling.philox import many_random_bits
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput, TokenLogprobs

_LARGEST = torch.finfo(torch.float32).max
_ROWS_AT_ONCE = 64  # 80 MB of whole numbers for a vocabulary of 151,936, several times

# Of some rows: token ids, their logits, ranks, peaks, total weights, top ids, their logits.
_Columns = tuple[Tensor, ...]


def sample_on_device(
    logits: Tensor, inputs: Sequence[SampleInput]
) -> list[tuple[int, TokenLogprobs | None]]:
    """As sampler.sample."""
    return begin_sampling(logits, inputs, None).tell()


def begin_sampling(
    logits: Tensor, inputs: Sequence[SampleInput], uncounted: Tensor | None
) -> DeviceDraws:
    """The same, without waiting for it. uncounted: as of Ops.begin_sampling."""
    plain = comparable_rows(logits)
    tokens = _choose(_adjusted(logits, plain, inputs, uncounted), inputs)
    num_tops = {
        i: item.params.logprobs for i, item in enumerate(inputs) if item.params.logprobs is not None
    }
    asking = list(num_tops)
    columns: list[_Columns] = []
    if asking:
        most = max(num_tops.values())
        columns = _logprob_columns(_take(plain, asking), _take(tokens, asking), most)
    return DeviceDraws(tokens, num_tops, columns)


class DeviceDraws:
    """Drawn tokens that are on their way to the host. token_ids: (N), int64, on the device."""

    def __init__(
        self, token_ids: Tensor, num_tops: Mapping[int, int], columns: Sequence[_Columns]
    ) -> None:
        """num_tops: how many alternatives each row that asked is told; columns: of those rows."""
        self.token_ids = token_ids
        self._told_ids = to_host(token_ids)
        self._num_tops = num_tops
        self._columns = [[to_host(column) for column in part] for part in columns]

    def tell(self) -> list[tuple[int, TokenLogprobs | None]]:
        """As sampler.sample, once it is there."""
        logprobs = {
            row: TokenLogprobs(each.token_id, each.logprob, each.rank, each.top[:num_top])
            for (row, num_top), each in zip(
                self._num_tops.items(), _tell_all(self._columns), strict=True
            )
        }
        tokens = self._told_ids.wait().tolist()
        return [(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def token_logprobs_on_device(
    logits: Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """As logprobs.token_logprobs."""
    tokens = to_device(torch.tensor(token_ids, dtype=torch.int64), logits.device)
    columns = _logprob_columns(comparable_rows(logits), tokens, num_top)
    return _tell_all([[to_host(column) for column in part] for part in columns])


def comparable_rows(logits: Tensor) -> Tensor:
    """A float32 copy in which NaN is -inf and +inf the largest number, as in `top.comparable`."""
    return logits.float().nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


def _take(rows: Tensor, indices: Sequence[int]) -> Tensor:
    if len(indices) == len(rows):
        return rows
    return rows[to_device(torch.tensor(indices), rows.device)]


def _adjusted(
    logits: Tensor, plain: Tensor, inputs: Sequence[SampleInput], uncounted: Tensor | None
) -> Tensor:
    """`plain` itself if nobody changes anything, else a copy with the rows of those that do."""
    changing = [i for i, item in enumerate(inputs) if item.changes_logits]
    changed = plain.clone() if changing else plain
    for start in range(0, len(changing), _ROWS_AT_ONCE):
        indices = changing[start : start + _ROWS_AT_ONCE]
        rows = _take(logits, indices).to(torch.float32, copy=True).contiguous()
        more = None if uncounted is None else _take(uncounted, indices)
        adjust(rows, [inputs[i] for i in indices], more)
        changed[to_device(torch.tensor(indices), rows.device)] = comparable_rows(rows)
    return changed


# ── the token: draw.py ──────────────────────────────────────────────────────────────────────────


def _choose(rows: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """(N), int64."""
    tokens = rows.argmax(dim=1)
    drawing = [i for i, item in enumerate(inputs) if not item.params.is_greedy]
    random = many_random_bits(
        [inputs[i].seed for i in drawing], [inputs[i].position for i in drawing]
    )
    for start in range(0, len(drawing), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        indices = drawing[part]
        some = _take(rows, indices)
        # Of nothing but -inf the likeliest, token 0, is chosen, which argmax gave.
        has_any = some.amax(1) > -torch.inf
        some = torch.where(has_any[:, None], some, 0.0)
        drawn = _draw(some, [inputs[i].params for i in indices], torch.from_numpy(random[part]))
        tokens[to_device(torch.tensor(indices), rows.device)] = torch.where(has_any, drawn, 0)
    return tokens


def _draw(rows: Tensor, params: Sequence[SamplingParams], random: Tensor) -> Tensor:
    """(M): a token of each row (M, V), which holds more than -inf, by its random number (M)."""
    device = rows.device
    scales = torch.tensor([1 / p.temperature for p in params], dtype=torch.float32)
    weights = relative_weights(rows, to_device(scales, device)[:, None])
    kept = units(weights)
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([p.min_p for p in params], dtype=torch.float32)
        kept = torch.where(weights < to_device(least, device)[:, None], 0, kept)
    if any(p.top_k > 0 for p in params):
        kept = _keep_top(rows, kept, [p.top_k for p in params])
    if any(p.top_p < 1 for p in params):
        kept = _keep_nucleus(weights, kept, [p.top_p for p in params])
    cdf = kept.cumsum(1)
    return (cdf <= share_of(cdf[:, -1:], to_device(random, device)[:, None])).sum(1)


def _keep_top(rows: Tensor, kept: Tensor, top_k: Sequence[int]) -> Tensor:
    """Units (M, V), with 0 for all but each row's top_k likeliest; 0 or less keeps all."""
    vocab_size = rows.shape[1]
    counts = torch.tensor([k if 0 < k < vocab_size else vocab_size for k in top_k])
    limited = int(torch.where(counts < vocab_size, counts, 0).max())
    if not limited:
        return kept
    ids = largest(rows, limited)
    counts = to_device(counts, rows.device)[:, None]
    is_top = torch.zeros_like(kept, dtype=torch.bool)
    is_top.scatter_(1, ids, torch.arange(limited, device=rows.device) < counts)
    return torch.where(is_top | (counts == vocab_size), kept, 0)


def _keep_nucleus(weights: Tensor, kept: Tensor, top_p: Sequence[float]) -> Tensor:
    """Units (M, V), with 0 for all but the fewest likeliest that hold top_p of the sum."""
    share = to_device(torch.tensor(top_p, dtype=torch.float64), kept.device)[:, None]
    limit = (share * kept.sum(1, keepdim=True).double()).long().clamp(min=1)
    # What was dropped before goes last, and adds nothing there.
    _, ids = weights.masked_fill(kept == 0, -1.0).sort(dim=1, descending=True, stable=True)
    ordered = kept.gather(1, ids)
    before = ordered.cumsum(1) - ordered
    nucleus = torch.zeros_like(kept).scatter_(1, ids, ordered * (before < limit))
    return torch.where(share < 1, nucleus, kept)


# ── logprobs: logprobs.py ───────────────────────────────────────────────────────────────────────


def _logprob_columns(rows: Tensor, tokens: Tensor, num_top: int) -> list[_Columns]:
    """Of M tokens (M) at their comparable rows (M, V), with so many of the likeliest."""
    starts = range(0, len(rows), _ROWS_AT_ONCE)
    parts = [slice(start, start + _ROWS_AT_ONCE) for start in starts]
    return [_some_columns(rows[part], tokens[part], num_top) for part in parts]


def _some_columns(rows: Tensor, tokens: Tensor, num_top: int) -> _Columns:
    own = rows.gather(1, tokens[:, None])
    ranks = 1 + (rows > own).sum(1)
    peaks = rows.amax(1, keepdim=True)
    flat = torch.where(peaks > -torch.inf, rows, 0.0)
    totals = units(relative_weights(flat, torch.ones_like(peaks))).sum(1)
    ids = largest(rows, num_top)
    top = rows.gather(1, ids)
    return tokens, own[:, 0], ranks, peaks[:, 0], totals, ids, top


def _tell_all(columns: Sequence[Sequence[HostCopy]]) -> list[TokenLogprobs]:
    """Of all rows, once they are there."""
    lists = ([column.wait().tolist() for column in part] for part in columns)
    return [_told(*figures) for part in lists for figures in zip(*part, strict=True)]


def _told(
    token: int,
    logit: float,
    rank: int,
    peak: float,
    total: int,
    top_ids: list[int],
    top: list[float],
) -> TokenLogprobs:
    log_total = log_sum_exp(peak, total)
    others = tuple((i, logprob(x, log_total)) for i, x in zip(top_ids, top, strict=True))
    return TokenLogprobs(token, logprob(logit, log_total), rank, others)
