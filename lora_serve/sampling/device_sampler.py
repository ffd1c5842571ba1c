"""The next token of each row where the logits are: `sampler.py` in torch, for all rows at once.

That file is the specification, and this one gives the same to the bit: weights are whole numbers
(`weights.py`), whose sums have no order; maxima, ranks and selections are exact; and the
exponential is spelled out in the same element-wise operations. Only tokens and the logprobs asked
for leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lora_serve.sampling.device_weights import largest, relative_weights, share_of, units
from lora_serve.sampling.logprobs import log_sum_exp, logprob
from lora_serve.sampling.philox import random_bits
from lora_serve.step import SampleInput, TokenLogprobs

_LARGEST = torch.finfo(torch.float32).max
_ROWS_AT_ONCE = 64  # 80 MB of whole numbers for a vocabulary of 151,936, several times


def sample_on_device(
    logits: Tensor, inputs: Sequence[SampleInput]
) -> list[tuple[int, TokenLogprobs | None]]:
    """As sampler.sample."""
    plain = comparable_rows(logits)
    tokens = _choose(_adjusted(logits, plain, inputs), inputs)
    asking = [i for i, item in enumerate(inputs) if item.params.logprobs is not None]
    num_top = max((inputs[i].params.logprobs or 0 for i in asking), default=0)
    found = _logprobs(_take(plain, asking), _take(tokens, asking), num_top) if asking else []
    logprobs = {
        i: TokenLogprobs(
            each.token_id, each.logprob, each.rank, each.top[: inputs[i].params.logprobs]
        )
        for i, each in zip(asking, found, strict=True)
    }
    return [(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]


def token_logprobs_on_device(
    logits: Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """As logprobs.token_logprobs."""
    tokens = torch.tensor(token_ids, dtype=torch.int64).to(logits.device)
    return _logprobs(comparable_rows(logits), tokens, num_top)


def comparable_rows(logits: Tensor) -> Tensor:
    """A float32 copy in which NaN is -inf and +inf the largest number, as in `top.comparable`."""
    return logits.float().nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


def _take(rows: Tensor, indices: Sequence[int]) -> Tensor:
    if len(indices) == len(rows):
        return rows
    return rows[torch.tensor(indices).to(rows.device)]


# ── what a request changes in its logits: adjust.py ─────────────────────────────────────────────


def _adjusted(logits: Tensor, plain: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """`plain` itself if nobody changes anything, else a copy with the rows of those that do."""
    changed = plain
    for index, item in enumerate(inputs):
        params = item.params
        if item.banned_token_ids or params.logit_bias or params.has_penalties:
            if changed is plain:
                changed = plain.clone()
            row = logits[index].to(torch.float32, copy=True)
            changed[index] = comparable_rows(_adjusted_row(row, item))
    return changed


def _adjusted_row(row: Tensor, item: SampleInput) -> Tensor:
    """Changes the row in place, in the order of adjust.py."""
    params = item.params
    row[_known(item.banned_token_ids, row)] = -torch.inf
    if params.logit_bias:
        biases = {i: bias for i, bias in params.logit_bias.items() if 0 <= i < len(row)}
        row[_known(list(biases), row)] += torch.tensor(list(biases.values())).to(row)
    if params.repetition_penalty != 1.0:
        ids = _known([*{*item.prompt_token_ids, *item.output_token_ids}], row)
        penalty = torch.tensor(params.repetition_penalty, dtype=torch.float32).to(row.device)
        seen = row[ids]
        row[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if params.has_penalties:
        _penalize_counts(row, item)
    return row


def _penalize_counts(row: Tensor, item: SampleInput) -> None:
    given = np.asarray(item.output_token_ids, np.int64)
    values, counts = np.unique(given[(given >= 0) & (given < len(row))], return_counts=True)
    ids = torch.from_numpy(values).to(row.device)
    frequency = np.float32(item.params.frequency_penalty) * counts.astype(np.float32)
    row[ids] -= torch.from_numpy(frequency).to(row.device)
    row[ids] -= torch.tensor(item.params.presence_penalty, dtype=torch.float32).to(row.device)


def _known(token_ids: Sequence[int], row: Tensor) -> Tensor:
    ids = [token_id for token_id in token_ids if 0 <= token_id < len(row)]
    return torch.tensor(ids, dtype=torch.int64).to(row.device)


# ── the token: draw.py ──────────────────────────────────────────────────────────────────────────


def _choose(rows: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """(N), int64."""
    tokens = rows.argmax(dim=1)
    drawing = [i for i, item in enumerate(inputs) if not item.params.is_greedy]
    for start in range(0, len(drawing), _ROWS_AT_ONCE):
        indices = drawing[start : start + _ROWS_AT_ONCE]
        some = _take(rows, indices)
        # Of nothing but -inf the likeliest, token 0, is chosen, which argmax gave.
        has_any = some.amax(1) > -torch.inf
        drawn = _draw(torch.where(has_any[:, None], some, 0.0), [inputs[i] for i in indices])
        tokens[torch.tensor(indices).to(rows.device)] = torch.where(has_any, drawn, 0)
    return tokens


def _draw(rows: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """(M): a token of each row (M, V), which holds more than -inf."""
    params = [item.params for item in inputs]
    device = rows.device
    scales = torch.tensor([1 / p.temperature for p in params], dtype=torch.float32).to(device)
    weights = relative_weights(rows, scales[:, None])
    kept = units(weights)
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([p.min_p for p in params], dtype=torch.float32).to(device)
        kept = torch.where(weights < least[:, None], 0, kept)
    if any(p.top_k > 0 for p in params):
        kept = _keep_top(rows, kept, [p.top_k for p in params])
    if any(p.top_p < 1 for p in params):
        kept = _keep_nucleus(weights, kept, [p.top_p for p in params])
    cdf = kept.cumsum(1)
    random = torch.tensor([random_bits(item.seed, item.position) for item in inputs]).to(device)
    return (cdf <= share_of(cdf[:, -1:], random[:, None])).sum(1)


def _keep_top(rows: Tensor, kept: Tensor, top_k: Sequence[int]) -> Tensor:
    """Units (M, V), with 0 for all but each row's top_k likeliest; 0 or less keeps all."""
    vocab_size = rows.shape[1]
    counts = torch.tensor([k if 0 < k < vocab_size else vocab_size for k in top_k])
    limited = int(torch.where(counts < vocab_size, counts, 0).max())
    if not limited:
        return kept
    ids = largest(rows, limited)
    counts = counts.to(rows.device)[:, None]
    is_top = torch.zeros_like(kept, dtype=torch.bool)
    is_top.scatter_(1, ids, torch.arange(limited, device=rows.device) < counts)
    return torch.where(is_top | (counts == vocab_size), kept, 0)


def _keep_nucleus(weights: Tensor, kept: Tensor, top_p: Sequence[float]) -> Tensor:
    """Units (M, V), with 0 for all but the fewest likeliest that hold top_p of the sum."""
    share = torch.tensor(top_p, dtype=torch.float64).to(kept.device)[:, None]
    limit = (share * kept.sum(1, keepdim=True).double()).long().clamp(min=1)
    # What was dropped before goes last, and adds nothing there.
    _, ids = weights.masked_fill(kept == 0, -1.0).sort(dim=1, descending=True, stable=True)
    ordered = kept.gather(1, ids)
    before = ordered.cumsum(1) - ordered
    nucleus = torch.zeros_like(kept).scatter_(1, ids, ordered * (before < limit))
    return torch.where(share < 1, nucleus, kept)


# ── logprobs: logprobs.py ───────────────────────────────────────────────────────────────────────


def _logprobs(rows: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Of M tokens (M) at their comparable rows (M, V), with so many of the likeliest."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        found += _some_logprobs(rows[part], tokens[part], num_top)
    return found


def _some_logprobs(rows: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprobs]:
    own = rows.gather(1, tokens[:, None])
    ranks = 1 + (rows > own).sum(1)
    peaks = rows.amax(1, keepdim=True)
    flat = torch.where(peaks > -torch.inf, rows, 0.0)
    totals = units(relative_weights(flat, torch.ones_like(peaks))).sum(1)
    ids = largest(rows, num_top)
    top = rows.gather(1, ids)
    columns = (tokens, own[:, 0], ranks, peaks[:, 0], totals, ids, top)
    return [
        _told(*figures) for figures in zip(*(column.tolist() for column in columns), strict=True)
    ]


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
