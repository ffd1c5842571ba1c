"""Which program walks which keys for which queries: a step's attention as a table of numbers.

Where queries and keys are cut changes no bit (see attention.py), so this is all about speed. Knows
no kernel, and of heads only that every tile is walked once for each.

    words: num single tiles, their start, num wide tiles, their start, num folds, their start,
           block tables' start, block tables' width; then the lists themselves
    tile:  request, first row of q, num tokens, first position, first span, end span,
           first row of its partial sums or -1, 0
    fold:  row of q, its first partial row, partial rows from span to span, num spans
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.host_copies import to_device
from lora_serve.ops.triton.launch import Machine
from lora_serve.ops.triton.plan_words import overwrite

# Keys that are summed by themselves: short spans spread short contexts over the card; long ones
# keep the sums of long contexts, which are folded one after the other, few.
SPAN, NEAR_SPANS, FAR_SPAN = 256, 32, 1024
TILE_TOKENS = 128  # of a wide tile; a single one has one token
HEADER_WORDS = 8
TILE_WORDS = 8
FOLD_WORDS = 4
# Sums of single spans that are kept at once, per head: 60 MB for 28 heads of 128. A step that
# would need more walks its shorter requests whole, and has enough of them to fill the card.
MAX_PARTIAL_ROWS = 4096
PROGRAMS_PER_MULTIPROCESSOR = 4  # twice what registers hold of a decode tile's

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """words: int32, on the device. The numbers are bounds of what stands there.

    is_reserved: programs are as many as the card runs at once, and each takes what tiles there are;
    else there is one for each tile.
    """

    words: Tensor
    num_single: int
    num_wide: int
    num_folds: int
    num_partial_rows: int
    is_reserved: bool = False

    def num_programs(self, num_units: int, machine: Machine) -> int:
        if not self.is_reserved:
            return num_units
        return min(num_units, PROGRAMS_PER_MULTIPROCESSOR * machine.num_multiprocessors)


@dataclass(frozen=True, slots=True)
class _Tables:
    tiles: Words
    is_wide: npt.NDArray[np.bool_]
    folds: Words
    num_partial_rows: int


def plan_attention(
    query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, device: torch.device
) -> AttentionPlan:
    tables = _tables(query_start_loc.numpy(), seq_lens.numpy())
    num_wide = int(tables.is_wide.sum())
    return AttentionPlan(
        to_device(torch.from_numpy(_words(tables, block_tables.numpy())), device),
        num_single=len(tables.tiles) - num_wide,
        num_wide=num_wide,
        num_folds=len(tables.folds),
        num_partial_rows=tables.num_partial_rows,
    )


def new_attention_plan(
    num_rows: int, max_blocks: int, block_size: int, is_decode: bool, device: torch.device
) -> AttentionPlan:
    """A plan for steps of num_rows rows and at most max_blocks a request; at first all padding.

    is_decode: the steps have one row for each request.
    """
    max_spans = int(_num_spans(np.array(max_blocks * block_size)))
    num_partial_rows = min(MAX_PARTIAL_ROWS, num_rows * max_spans)
    num_tiles = num_rows + num_partial_rows
    num_words = HEADER_WORDS + num_tiles * TILE_WORDS + num_rows * (FOLD_WORDS + max_blocks)
    plan = AttentionPlan(
        torch.zeros(num_words, dtype=torch.int32, device=device),
        num_single=num_tiles,
        num_wide=0 if is_decode else num_tiles // 2,  # of two rows at least
        num_folds=num_rows,
        num_partial_rows=num_partial_rows,
        is_reserved=True,
    )
    no_one = np.empty(0, np.int32)
    fill_attention_plan(plan, np.zeros(1, np.int32), no_one, no_one.reshape(0, 0))
    return plan


def fill_attention_plan(
    plan: AttentionPlan,
    query_start_loc: Words,
    seq_lens: Words,
    block_tables: Words,
) -> None:
    """Rows beyond those of the requests are padding: they see no key, and their attention is 0."""
    assert plan.is_reserved, "a plan of one step cannot take another's"
    num_rows, num_taken = plan.num_folds, int(query_start_loc[-1])
    padding = np.arange(num_taken + 1, num_rows + 1, dtype=np.int32)  # requests of a row each
    starts = np.concatenate((query_start_loc, padding))
    lengths = np.concatenate((seq_lens, np.zeros_like(padding)))
    tables = _tables(starts, lengths)
    num_wide = int(tables.is_wide.sum())
    assert num_wide <= plan.num_wide, f"{num_wide} wide tiles, {plan.num_wide} are reserved"
    overwrite(plan.words, _words(tables, block_tables))


def _tables(starts: Words, seq_lens: Words) -> _Tables:
    num_new = starts[1:] - starts[:-1]
    num_tiles = -(-num_new // TILE_TOKENS)
    request, index = _spread(num_tiles)
    offset = TILE_TOKENS * index
    tokens = np.minimum(TILE_TOKENS, num_new[request] - offset)
    row = starts[request] + offset
    position = (seq_lens - num_new)[request] + offset
    spans = _num_spans(position + tokens)
    is_apart = _walked_apart(tokens, np.where(num_tiles[request] == 1, spans, 1))

    partial_rows = tokens * spans * is_apart
    first_partial = _before(partial_rows)
    # First all that are walked whole, and of the others their first spans.
    first_end, first_row = np.where(is_apart, 1, spans), np.where(is_apart, first_partial, -1)
    firsts = np.empty((len(request), TILE_WORDS), np.int32)
    for column, values in enumerate((request, row, tokens, position, 0, first_end, first_row, 0)):
        firsts[:, column] = values
    tile, part = _spread(np.where(is_apart, spans, 1))
    tiles = firsts[tile]
    tiles[:, 4] += part
    tiles[:, 5] += part
    tiles[:, 6] += part * tiles[:, 2]
    longest_first = (tiles[:, 4] - tiles[:, 5]).argsort(kind="stable")
    tiles = tiles[longest_first]
    folds = _folds(row[is_apart], tokens[is_apart], spans[is_apart], first_partial[is_apart])
    return _Tables(tiles, tiles[:, 2] > 1, folds, int(partial_rows.sum()))


def _num_spans(num_keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many spans the first keys lie in."""
    near = np.minimum(num_keys, NEAR_SPANS * SPAN)
    return -(-near // SPAN) - (-(num_keys - near) // FAR_SPAN)


def _walked_apart(
    tokens: npt.NDArray[np.int64], spans: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """The tiles of several spans that get programs for each, longest first while memory lasts."""
    are_several = spans > 1
    rows = tokens * spans * are_several
    if rows.sum() <= MAX_PARTIAL_ROWS:
        return are_several
    order = (-spans).argsort(kind="stable")
    fits = np.empty(len(rows), dtype=bool)
    fits[order] = rows[order].cumsum() <= MAX_PARTIAL_ROWS
    return fits & are_several


def _folds(
    row: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    spans: npt.NDArray[np.int64],
    first_partial: npt.NDArray[np.int64],
) -> Words:
    """One for each token of the tiles whose spans are walked apart."""
    tile, token = _spread(tokens)
    columns = (row[tile] + token, first_partial[tile] + token, tokens[tile], spans[tile])
    return np.array(columns, np.int32).T


def _words(tables: _Tables, block_tables: Words) -> Words:
    single, wide = tables.tiles[~tables.is_wide], tables.tiles[tables.is_wide]
    wide_start = HEADER_WORDS + single.size
    fold_start = wide_start + wide.size
    table_start = fold_start + tables.folds.size
    lists = (len(single), HEADER_WORDS, len(wide), wide_start, len(tables.folds), fold_start)
    header = (*lists, table_start, block_tables.shape[1])
    parts = (np.array(header), single, wide, tables.folds, block_tables)
    return np.concatenate([part.ravel() for part in parts], dtype=np.int32)


def _spread(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The index of each counted thing's count, and its number within that count."""
    owner = np.arange(len(counts)).repeat(counts)
    return owner, np.arange(len(owner)) - _before(counts)[owner]


def _before(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sum of the counts before each count."""
    return counts.cumsum() - counts
