from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lora_serve.bitmask import bitmask_of
from lora_serve.distributed.group import Group
from lora_serve.distributed.in_process import in_process_groups
from lora_serve.distributed.shares import place_of
from lora_serve.layers.divided_argmax import OPEN, DividedArgmax
from lora_serve.sampling.specification.adjust import allowed_tokens

VOCAB_SIZE = 21  # shares begin within bytes of bitmasks


@dataclass
class Columns:
    """A `Screen` of the identity's rows: x are the logits. Those of infinite ones are open."""

    share: range

    def __call__(self, x: Tensor, bitmasks: Sequence[bytes | None]) -> list[int]:
        own, tokens = x[:, self.share.start : self.share.stop].clone(), []
        for row, mask in zip(own, bitmasks or [None] * len(x), strict=True):
            if mask is not None:
                row[torch.from_numpy(~allowed_tokens(mask, len(row)))] = -1e9
            is_open = bool(row.isinf().any()) or float(row.max()) == -1e9
            tokens.append(OPEN if is_open else int(row.argmax()))
        return tokens

    def outputs(self, x: Tensor, tokens: Sequence[int]) -> list[float]:
        return [float(row[self.share.start + token]) for row, token in zip(x, tokens, strict=True)]


def found(x: Tensor, bitmasks: Sequence[bytes | None] = (), world_size: int = 4) -> list[int]:
    """What all ranks find, which is the same."""

    def on_rank(group: Group) -> list[int]:
        own = Columns(place_of(group).share(VOCAB_SIZE))
        return DividedArgmax(own, group, VOCAB_SIZE)(x, bitmasks)

    with ThreadPoolExecutor(world_size) as threads:
        results = list(threads.map(on_rank, in_process_groups(world_size)))
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_it_is_the_first_of_the_largest(world_size: int) -> None:
    x = torch.randint(4, (50, VOCAB_SIZE), generator=torch.Generator().manual_seed(1)).float()
    assert found(x, (), world_size) == [row.index(max(row)) for row in x.tolist()]


def test_only_what_is_allowed_counts() -> None:
    x = torch.arange(VOCAB_SIZE).expand(4, -1).float()
    masks = [bitmask_of(tokens, VOCAB_SIZE) for tokens in ([3, 7], [20], [0, 5, 6])]
    assert found(x, [*masks, None]) == [7, 20, 6, 20]


def test_it_is_open_where_a_rank_leaves_it_open_or_nothing_is_allowed() -> None:
    x = torch.arange(VOCAB_SIZE).expand(3, -1).float().clone()
    x[1, 2] = torch.inf
    assert found(x, [None, None, bytes(3)]) == [20, OPEN, OPEN]
