"""Adapters as tables of addresses, and which rows of a step use which.

An adapter's weights stay where they were packed; a table says where. A step's plan names adapters
by their tables' addresses, so that a batch mixes any number of them, of any ranks, and rows without
an adapter are in no tile. The a of all parts of a linear layer lie together: they share x. Knows no
kernel.

    layer: address of a (columns, in), columns, 0 0 0 0 0 0; then MAX_PARTS parts; a (rank, in) of
           each part begins at its first column
    part:  address of b (out, rank), rank, out, first output, first column, scale (float32 bits)
    words: num tiles, 0, 0, 0; then the tiles
    tile:  address of the adapter's table, first row, num rows, 0; up to TILE_ROWS rows each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.errors import AdapterError
from lora_serve.host_copies import to_device
from lora_serve.ops.contract import LoRAPart
from lora_serve.ops.triton.plan_words import overwrite

MAX_PARTS = 4  # of one linear layer: q, k and v are three
LAYER_WORDS = 32
FIRST_PART_WORD = 8
PART_WORDS = 6
TILE_WORDS = 4
HEADER_WORDS = 4
TILE_ROWS = 16  # what the smallest tensor core instruction takes, for decode's single rows
RANK_STEP = 8  # ranks are filled up to it with zeros: a row of b is then a whole number of 16 bytes
RESERVED_COLUMNS = 3 * 512  # q, k and v of the highest rank; 30 MB of scratch for 256 rows


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """table: (linear layers, LAYER_WORDS), int64, on the device. weights: what it points to.

    columns[i]: of linear layer i, the sum of its parts' ranks; 0 if the adapter leaves it alone.
    """

    table: Tensor
    columns: tuple[int, ...]
    weights: tuple[Tensor, ...]


class Columns(Protocol):
    """A number for each linear layer."""

    def __getitem__(self, linear_index: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class LoRAPlan:
    """words: int64, on the device. num_tiles bounds how many stand there.

    columns[i]: of linear layer i, the most of any adapter. A reserved plan knows no adapter: None.
    """

    words: Tensor
    num_tiles: int
    columns: Columns | None

    @property
    def is_reserved(self) -> bool:
        return self.columns is None

    def columns_of(self, linear_index: int) -> int:
        if self.columns is None:
            return RESERVED_COLUMNS
        return self.columns[linear_index] if self.columns else 0


Segments = Sequence[tuple[int, int, PackedAdapter]]


def pack_adapter(linears: Sequence[Sequence[LoRAPart]], device: torch.device) -> PackedAdapter:
    """Copies all parts to the device; the sources are not kept.

    Raises:
        AdapterError: for ranks beyond what recorded steps have room for.
    """
    table = np.zeros((len(linears), LAYER_WORDS), dtype=np.int64)
    weights: list[Tensor] = []
    for words, parts in zip(table, linears, strict=True):
        assert len(parts) <= MAX_PARTS, f"{len(parts)} parts in one linear layer"
        if not parts:
            continue
        padded = [_padded(part, device) for part in parts]
        a = torch.cat([part_a for part_a, _ in padded])
        words[:2] = a.data_ptr(), len(a)
        column = 0
        for index, (part, (part_a, b)) in enumerate(zip(parts, padded, strict=True)):
            start = FIRST_PART_WORD + index * PART_WORDS
            scale = int(np.float32(part.scale).view(np.int32))
            where = (b.data_ptr(), len(part_a), len(b), part.out_start, column, scale)
            words[start : start + PART_WORDS] = where
            column += len(part_a)
        if column > RESERVED_COLUMNS:
            raise AdapterError(
                f"ranks of {column} in one fused layer: the GPU kernels take {RESERVED_COLUMNS}; "
                "train with a lower rank, or merge the adapter into its model"
            )
        weights += [a, *(b for _, b in padded)]
    columns = tuple(int(count) for count in table[:, 1])
    on_device = to_device(torch.from_numpy(table), device)
    return PackedAdapter(on_device, columns, tuple(weights))


def plan_lora(segments: Segments, num_tokens: int, device: torch.device) -> LoRAPlan:
    assert not segments or segments[-1][1] <= num_tokens, f"{segments[-1]} of {num_tokens} rows"
    words = _words(segments)
    columns = zip(*(adapter.columns for _, _, adapter in segments), strict=True)
    on_device = to_device(torch.from_numpy(words), device)
    return LoRAPlan(on_device, int(words[0]), tuple(map(max, columns)))


def new_lora_plan(num_rows: int, device: torch.device) -> LoRAPlan:
    """A plan for at most num_rows rows, each with its own adapter or none; at first with none."""
    num_words = HEADER_WORDS + num_rows * TILE_WORDS
    return LoRAPlan(torch.zeros(num_words, dtype=torch.int64, device=device), num_rows, None)


def fill_lora_plan(plan: LoRAPlan, segments: Segments) -> None:
    assert plan.is_reserved, "a plan of one step cannot take another's"
    num_rows = segments[-1][1] if segments else 0
    assert num_rows <= plan.num_tiles, f"{num_rows} rows, {plan.num_tiles} are reserved"
    overwrite(plan.words, _words(segments))


def _padded(part: LoRAPart, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both a (rank, in) and b (out, rank) on the device, the rank a multiple of RANK_STEP."""
    missing = -part.a.shape[0] % RANK_STEP
    a = torch.nn.functional.pad(part.a.detach().to(device), (0, 0, 0, missing))
    b = torch.nn.functional.pad(part.b.detach().to(device), (0, missing))
    return a, b.clone(memory_format=torch.contiguous_format)


def _words(segments: Segments) -> npt.NDArray[np.int64]:
    words = [0] * HEADER_WORDS
    previous_end = 0
    for start, end, adapter in segments:
        assert previous_end <= start < end, f"segment {start}:{end} after row {previous_end}"
        previous_end = end
        address = adapter.table.data_ptr()
        for row in range(start, end, TILE_ROWS):
            words += address, row, min(TILE_ROWS, end - row), 0
    words[0] = (len(words) - HEADER_WORDS) // TILE_WORDS
    return np.array(words, dtype=np.int64)
