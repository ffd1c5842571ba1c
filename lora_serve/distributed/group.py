"""What ranks do together: each gives its part of some rows, and all get the whole rows.

The one rule: parts are put side by side in the order of ranks, and nothing is added up here. So a
row has the same bits at any number of ranks, whichever of them was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

ROOT = 0  # the rank in the engine's own process


class Group(Protocol):
    """One rank's way to the others. All of them make the same calls, in the same order.

    rank: in [0, world_size).
    """

    rank: int
    world_size: int

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        """Put the parts of all ranks side by side.

        Args:
            part: (T, widths[rank]), contiguous.
            widths: of each rank's part; 0 where a rank gives nothing.
            whole: (T, sum(widths)), contiguous, is filled.
            while_loading: whether the others may take as long to come to this call as a load may,
                rather than a step.

        Raises:
            RankLostError: another rank has ended, or did not come in time.
        """

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        """Give each rank its columns of rows that all have, and take the own ones of all ranks.

        Args:
            rows: (T, width), contiguous.
            shares: each rank's columns; they may overlap.
            parts: (world_size, T, len(shares[rank])), contiguous, is filled.

        Raises:
            RankLostError: another rank has ended, or did not come in time.
        """

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Rows in memory that all ranks see, as the `whole` of a `gather`, which copies less then.

        What they hold is good until this rank's next call, and no rank writes to them. None, on all
        ranks: the group has no such memory, or not as much.
        """

    def close(self) -> None:
        """Give back what the group holds; no call may follow.

        What others wait for from this rank never comes. Some groups tell them so, and no caller may
        rely on it: a rank's end is seen by who watches its process.
        """


class Alone:
    """The one rank of a model that is not divided."""

    rank = 0
    world_size = 1

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        """Do what `Group` says."""
        whole.copy_(part)

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        """Do what `Group` says."""
        parts[0].copy_(own_columns(rows, shares[0]))

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Do what `Group` says."""
        return None

    def close(self) -> None:
        """Do what `Group` says."""


ALONE = Alone()


def rows_in(memory: Tensor, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
    """View the beginning of some bytes as rows; None where these need more."""
    num_bytes = num_rows * width * dtype.itemsize
    return (
        memory[:num_bytes].view(dtype).view(num_rows, width) if num_bytes <= len(memory) else None
    )


def own_columns(rows: Tensor, share: range) -> Tensor:
    """View some columns of rows (T, width)."""
    return rows[:, share.start : share.stop]


def exchange(group: Group, value: bytes) -> list[bytes]:
    """The values that all ranks give while they load, of any lengths, in the order of ranks."""
    sizes = torch.empty(1, group.world_size, dtype=torch.int64)
    own_size = torch.tensor([[len(value)]], dtype=torch.int64)
    group.gather(own_size, [1] * group.world_size, sizes, while_loading=True)
    widths = sizes[0].tolist()
    values = torch.empty(1, sum(widths), dtype=torch.uint8)
    own = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else values[0, :0]
    group.gather(own.view(1, -1), widths, values, while_loading=True)
    return [part.numpy().tobytes() for part in values[0].split(widths)]


def broadcast(group: Group, values: Tensor) -> Tensor:
    """What the root gives.

    values: (K), contiguous; of other ranks only the number, dtype and device count.
    """
    if group.world_size == 1:
        return values
    widths = [0] * group.world_size
    widths[ROOT] = len(values)
    part = values if group.rank == ROOT else values[:0]
    whole = torch.empty(1, len(values), dtype=values.dtype, device=values.device)
    group.gather(part.view(1, -1), widths, whole)
    return whole[0]
