"""Ranks with a GPU each: NCCL between the cards, another group for what lies on the host.

The one rule: what ranks exchange on their cards is work of the card, in the order of the kernels
around it. A call asks for it and returns; so it can be part of a CUDA graph, and a rank that never
comes is found by whoever waits for the end of a step. Only what lies on the host is waited for
here: what ranks agree on while they load.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lora_serve.distributed.group import Group
from lora_serve.distributed.torch_group import TorchGroup


def open_nccl(store: c10d.Store, rank: int, world_size: int, limit: timedelta) -> c10d.Backend:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = limit
    return c10d.ProcessGroupNCCL(store, rank, world_size, options)


class StreamGroup(TorchGroup):
    """A `Group` whose exchanges are work of the current stream, which the host does not wait for.

    So its limits are nothing to a call.
    """

    def close(self) -> None:
        """Do what `Group` says, and give up what others have not come to."""
        self._backend.abort()
        super().close()

    def _await(self, work: Any, limit: timedelta) -> None:
        work.wait()  # with a limit, it would be the host that waits


class CardGroup:
    """One rank's `Group` for tensors on its card and on the host, by where they are."""

    def __init__(self, on_cards: Group, on_hosts: Group, card: torch.device) -> None:
        """Exchange once on the cards: NCCL takes what it holds before memory is measured."""
        self.rank = on_cards.rank
        self.world_size = on_cards.world_size
        self._on_cards = on_cards
        self._on_hosts = on_hosts
        self._card = card
        own = torch.zeros(1, 1, device=card)
        on_cards.gather(own, [1] * self.world_size, own.new_empty(1, self.world_size))
        parts = own.new_empty(self.world_size, 1, 1)
        on_cards.all_to_all(own, [range(1)] * self.world_size, parts)

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        """Do what `Group` says."""
        self._where(part).gather(part, widths, whole, while_loading=while_loading)

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        """Do what `Group` says."""
        self._where(rows).all_to_all(rows, shares, parts)

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Do what `Group` says."""
        return None

    def close(self) -> None:
        """Do what `Group` says."""
        try:
            self._on_cards.close()
        finally:
            self._on_hosts.close()

    def _where(self, values: Tensor) -> Group:
        return self._on_cards if values.device == self._card else self._on_hosts
