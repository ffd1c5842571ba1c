"""The next token of each row where the logits are: `sampler.py`, for all rows at once.

That file is the specification; this one differs from it by rounding alone (weights are floats
here). Rows still do not see
each other: maxima, ranks and selections are exact, and sums are made of element-wise additions,
whose order follows from a row's length alone. Only tokens and the logprobs asked for leave the
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lora_serve.sampling.device_sums import first_passing, row_sums
from lora_serve.sampling.philox import uniform
from lora_serve.step import SampleInput, TokenLogprobs

_LARGEST = torch.finfo(torch.float32).max
_ID_BITS = 24  # of a sort key; no vocabulary has more tokens


def sample_on_device(
    logits: Tensor, inputs: Sequence[SampleInput]
) -> list[tuple[int, TokenLogprobs | None]]:
    """One token for each row, with logprobs of the unchanged logits where params.logprobs is set.

    Args:
        logits: (N, V), any float type; not changed.
        inputs: N, one for each row.
    """
    logits = logits.float()
    plain = comparable_rows(logits)
    tokens = _choose(_adjusted(logits, plain, inputs), inputs)
    asking = [i for i, item in enumerate(inputs) if item.params.logprobs is not None]
    logprobs: dict[int, TokenLogprobs] = {}
    if asking:
        num_top = [inputs[i].params.logprobs or 0 for i in asking]
        found = _logprobs(_take(plain, asking), _take(tokens, asking), num_top)
        logprobs = dict(zip(asking, found, strict=True))
    return [(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]


def comparable_rows(logits: Tensor) -> Tensor:
    """A copy in which NaN is -inf and +inf the largest number, as `top.comparable` has it."""
    return logits.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


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
            changed[index] = comparable_rows(_adjusted_row(logits[index].clone(), item))
    return changed


def _adjusted_row(row: Tensor, item: SampleInput) -> Tensor:
    """Changes the row in place, in the order of adjust.py."""
    params = item.params
    row[_known(item.banned_token_ids, row)] = -torch.inf
    if params.logit_bias:
        biases = {i: bias for i, bias in params.logit_bias.items() if 0 <= i < len(row)}
        row[_known(list(biases), row)] += torch.tensor(list(biases.values())).to(row)
    if params.repetition_penalty != 1.0:
        ids = _known([*set(item.prompt_token_ids), *set(item.output_token_ids)], row)
        seen = torch.zeros_like(row, dtype=torch.bool)
        seen[ids] = True
        penalty = params.repetition_penalty
        row = torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row)
    if params.has_penalties:
        values, counts = np.unique(np.asarray(item.output_token_ids, np.int64), return_counts=True)
        is_known = (values >= 0) & (values < len(row))
        ids = torch.from_numpy(values[is_known]).to(row.device)
        num_seen = torch.from_numpy(counts[is_known].astype(np.float32)).to(row.device)
        row[ids] -= params.frequency_penalty * num_seen
        row[ids] -= params.presence_penalty
    return row


def _known(token_ids: Sequence[int], row: Tensor) -> Tensor:
    ids = [token_id for token_id in token_ids if 0 <= token_id < len(row)]
    return torch.tensor(ids, dtype=torch.int64).to(row.device)


# ── the token: draw.py ──────────────────────────────────────────────────────────────────────────


def _choose(rows: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """(N), int64."""
    tokens = rows.argmax(dim=1)
    drawing = [i for i, item in enumerate(inputs) if not item.params.is_greedy]
    if not drawing:
        return tokens
    vocab_size = rows.shape[1]
    by_rank = [i for i in drawing if 0 < inputs[i].params.top_k < vocab_size]
    by_id = [i for i in drawing if not 0 < inputs[i].params.top_k < vocab_size]
    for indices in (by_rank, by_id):
        if indices:
            some = _take(rows, indices)
            has_any = some.amax(1) > -torch.inf
            some = torch.where(has_any[:, None], some, 0.0)
            chosen = _draw(some, [inputs[i] for i in indices])
            # Of nothing but -inf token 0 is chosen, which argmax gave.
            tokens[torch.tensor(indices).to(rows.device)] = torch.where(has_any, chosen, 0)
    return tokens


def _draw(rows: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """(M): a token of each row (M, V), which holds more than -inf.

    Either all of them have a top_k below V, or none has.
    """
    params = [item.params for item in inputs]
    uniforms = [uniform(item.seed, item.position) for item in inputs]
    table = torch.tensor(
        [
            [p.temperature, p.min_p, p.top_p, p.top_k, u]
            for p, u in zip(params, uniforms, strict=True)
        ],
        dtype=torch.float64,
    ).to(rows.device)
    temperature, min_p, top_p, top_k, where = table.T[:, :, None]
    most = max(p.top_k for p in params)
    ids = None
    if 0 < most < rows.shape[1]:
        ids = largest(rows, most)
        rows = rows.gather(1, ids)
        rank = torch.arange(most, device=rows.device)
        rows = rows.masked_fill(rank >= top_k, -torch.inf)
        ids, by_id = ids.sort(dim=1)
        rows = rows.gather(1, by_id)
    weights = ((rows - rows.amax(1, keepdim=True)) / temperature.float()).exp()
    weights *= weights >= min_p.float()
    if any(p.top_p < 1 for p in params):
        weights = torch.where(top_p < 1, _nuclei(weights, top_p), weights)
    index = first_passing(weights.double(), where)
    return index if ids is None else ids.gather(1, index[:, None])[:, 0]


def _nuclei(weights: Tensor, top_p: Tensor) -> Tensor:
    """The weights (M, W), with 0 for all but the fewest largest that hold top_p (M, 1) of a row."""
    ordered, ids = weights.sort(dim=1, descending=True, stable=True)
    last = first_passing(ordered.double(), top_p, reaching=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    ordered.masked_fill_(rank > last[:, None], 0)
    return torch.zeros_like(weights).scatter_(1, ids, ordered)


def largest(rows: Tensor, k: int) -> Tensor:
    """(M, k): ids of each row's k largest, likeliest first and lowest id first among equals.

    Keys that no two entries share make the selection exact whatever algorithm selects.
    """
    bits = (rows + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    width = rows.shape[1]
    keys = (ordered << _ID_BITS) + torch.arange(width - 1, -1, -1, device=rows.device)
    return keys.topk(min(k, width), dim=1).indices


# ── logprobs: logprobs.py ───────────────────────────────────────────────────────────────────────


def _logprobs(rows: Tensor, tokens: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Of M tokens (M) at their rows (M, V), with so many of the likeliest."""
    chosen = rows.gather(1, tokens[:, None])
    peak = rows.amax(1, keepdim=True).double()
    total = row_sums((rows.double() - peak).exp())
    log_total = torch.where(peak > -torch.inf, peak + total.log(), -torch.inf)
    ranks = 1 + (rows > chosen).sum(1)
    ids = largest(rows, max(num_top))
    shown = torch.cat((chosen, rows.gather(1, ids)), dim=1).double()
    logprobs = torch.where(shown > -torch.inf, shown - log_total, -torch.inf)
    values = zip(tokens.tolist(), ranks.tolist(), ids.tolist(), logprobs.tolist(), strict=True)
    return [
        TokenLogprobs(token, own, rank, tuple(zip(top_ids[:count], others, strict=False)))
        for (token, rank, top_ids, (own, *others)), count in zip(values, num_top, strict=True)
    ]
