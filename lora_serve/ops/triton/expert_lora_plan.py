"""Which deltas the pairs of rows and their experts get, planned on the device.

Pairs are sorted by their adapter and expert, in the order of their rows, and cut into tiles; the
words say so as those of lora_plan.py do. The host knows which rows have adapters, not what they
chose: it waits for nothing, and shapes depend on rows and adapters alone. Layers read rows between
this and the deltas, so that no kernel that begins early finds words that are still being written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lora_serve.host_copies import to_device
from lora_serve.ops.contract import ChosenExperts
from lora_serve.ops.triton.lora_plan import (
    HEADER_WORDS,
    TILE_ROWS,
    TILE_WORDS,
    LoRAPlan,
    PackedAdapter,
)

# (start, end, adapters), as PlanPairs has them.
Changes = Sequence[tuple[int, int, Sequence[PackedAdapter]]]


@dataclass(frozen=True, slots=True)
class MostColumns:
    """The most columns of any adapter of each linear layer: found when asked for, for a few."""

    adapters: Sequence[PackedAdapter]

    def __getitem__(self, linear_index: int) -> int:
        return max(adapter.columns[linear_index] for adapter in self.adapters)


def plan_pairs(changes: Changes, chosen: ChosenExperts) -> tuple[Tensor, LoRAPlan]:
    num_rows, num_chosen = chosen.ids.shape
    adapters = [adapter for _, _, of_experts in changes for adapter in of_experts]
    num_experts = len(changes[0][2])
    first_keys = np.full(num_rows, len(adapters), np.int64)  # of rows without: behind all others
    for index, (start, end, _) in enumerate(changes):
        first_keys[start:end] = index * num_experts
    addresses = np.array([adapter.table.data_ptr() for adapter in adapters], np.int64)
    table = to_device(torch.from_numpy(np.concatenate((addresses, first_keys))), chosen.ids.device)
    keys = table[len(adapters) :, None] + chosen.ids
    ordered, order = keys.flatten().sort(stable=True)
    num_pairs = num_chosen * sum(end - start for start, end, _ in changes)
    most_tiles = num_pairs // TILE_ROWS + min(len(adapters), num_pairs)
    words = _words(ordered, table[: len(adapters)], most_tiles)
    return order[:num_pairs], LoRAPlan(words, most_tiles, MostColumns(adapters))


def _words(ordered_keys: Tensor, addresses: Tensor, most_tiles: int) -> Tensor:
    """The words of a plan of at most so many tiles; what stands beyond those there are is unread.

    ordered_keys: the number of its adapter and expert for each pair; addresses: by that number.
    """
    device, num_keys = ordered_keys.device, len(addresses)
    numbers = torch.arange(num_keys + 1, device=device)
    begins = torch.searchsorted(ordered_keys, numbers)
    tiles = (begins.diff() + (TILE_ROWS - 1)) // TILE_ROWS
    ends = tiles.cumsum(0)
    tile = torch.arange(most_tiles, device=device)
    key = torch.searchsorted(ends, tile, right=True).clamp_(max=num_keys - 1)
    first = begins[key] + (tile - (ends - tiles)[key]) * TILE_ROWS
    num_rows = (begins[key + 1] - first).clamp_(max=TILE_ROWS)
    words = torch.zeros(HEADER_WORDS + most_tiles * TILE_WORDS, dtype=torch.int64, device=device)
    words[:1] = ends[-1:]
    of_tiles = torch.stack((addresses[key], first, num_rows, torch.zeros_like(first)), dim=1)
    words[HEADER_WORDS:] = of_tiles.flatten()
    return words
