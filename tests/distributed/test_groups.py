"""Every kind of group puts the ranks' parts side by side, and none waits without an end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from lora_serve.distributed import shared_memory
from lora_serve.distributed.agreement import least, require_equal
from lora_serve.distributed.group import ALONE, Group, broadcast, exchange
from lora_serve.distributed.in_process import in_process_groups
from lora_serve.distributed.torch_group import TorchGroup
from lora_serve.errors import ConfigError, RankLostError

SECONDS = 60.0
MakeGroups = Callable[[int, float], Sequence[Callable[[], Group]]]


def in_shared_memory(world_size: int, seconds: float) -> list[Callable[[], Group]]:
    descriptor = shared_memory.new_memory(world_size)

    def make(rank: int) -> Group:
        return shared_memory.SharedMemoryGroup(rank, world_size, os.dup(descriptor), seconds)

    return [lambda rank=rank: make(rank) for rank in range(world_size)]  # type: ignore[misc]


@pytest.fixture(params=["threads", "shared_memory", "gloo"])
def make_groups(request: pytest.FixtureRequest, tmp_path: Path) -> MakeGroups:
    def make(world_size: int, seconds: float) -> Sequence[Callable[[], Group]]:
        match request.param:
            case "threads":
                groups = in_process_groups(world_size, seconds)
                return [lambda group=group: group for group in groups]  # type: ignore[misc]
            case "shared_memory":
                if not shared_memory.is_supported():
                    pytest.skip("this processor does not show writes in their order")
                return in_shared_memory(world_size, seconds)
            case _:
                return [
                    lambda rank=rank: TorchGroup(rank, world_size, tmp_path / "meeting", seconds)  # type: ignore[misc]
                    for rank in range(world_size)
                ]

    return make


Got = TypeVar("Got")


def on_all(makers: Sequence[Callable[[], Group]], work: Callable[[Group], Got]) -> list[Got]:
    """What each rank's thread gets."""

    def run(make: Callable[[], Group]) -> Got:
        return work(make())

    with ThreadPoolExecutor(len(makers)) as threads:
        return list(threads.map(run, makers))


def part_of(rank: int, width: int, rows: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(rows, width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_parts_stand_side_by_side_in_the_order_of_ranks(
    make_groups: MakeGroups, dtype: torch.dtype
) -> None:
    widths = [3, 0, 7]
    expected = [
        torch.cat([part_of(r, w, 5, dtype, turn) for r, w in enumerate(widths)], dim=1)
        for turn in range(9)
    ]

    def gather_often(group: Group) -> list[Tensor]:
        results = []
        for turn in range(9):
            whole = torch.empty(5, sum(widths), dtype=dtype)
            part = part_of(group.rank, widths[group.rank], 5, dtype, turn)
            group.gather(part, widths, whole)
            results.append(whole)
        return results

    for results in on_all(make_groups(3, SECONDS), gather_often):
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_rank_gets_its_columns_of_the_rows_of_all(
    make_groups: MakeGroups, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also piece by piece, and beside gathers."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 64)
    shares = [range(4), range(2, 7), range(7, 7)]

    def exchange_often(group: Group) -> list[bool]:
        own, results = shares[group.rank], []
        for turn in range(5):
            rows = [part_of(rank, 7, 5, dtype, turn) for rank in range(3)]
            parts = torch.empty(3, 5, len(own), dtype=dtype)
            group.all_to_all(rows[group.rank], shares, parts)
            exchange(group, b"between")
            expected = torch.stack(rows)[:, :, own.start : own.stop]
            results.append(torch.equal(parts, expected))
        return results

    assert on_all(make_groups(3, SECONDS), exchange_often) == [[True] * 5] * 3


def test_rows_that_fill_no_slot_at_once_are_gathered_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 256)
    widths, rows = [20, 30], 50
    expected = torch.cat([part_of(r, w, rows, torch.float32) for r, w in enumerate(widths)], dim=1)

    def gather(group: Group) -> Tensor:
        whole = torch.empty(rows, sum(widths))
        group.gather(part_of(group.rank, widths[group.rank], rows, torch.float32), widths, whole)
        return whole

    for whole in on_all(in_shared_memory(2, SECONDS), gather):
        assert torch.equal(whole, expected)


def test_values_of_any_length_are_exchanged(make_groups: MakeGroups) -> None:
    def swap(group: Group) -> list[bytes]:
        return exchange(group, b"rank" * group.rank)

    assert on_all(make_groups(3, SECONDS), swap) == [[b"", b"rank", b"rankrank"]] * 3


def test_the_first_rank_tells_the_others(make_groups: MakeGroups) -> None:
    def told(group: Group) -> list[int]:
        return broadcast(group, torch.arange(4) * (10 if group.rank == 0 else 1)).tolist()

    assert on_all(make_groups(2, SECONDS), told) == [[0, 10, 20, 30]] * 2
    assert broadcast(ALONE, torch.arange(3)).tolist() == [0, 1, 2]


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(make_groups: MakeGroups) -> None:
    comes_late = threading.Event()

    def wait(group: Group) -> str:
        if group.rank == 1:
            comes_late.wait(SECONDS)
            return ""
        try:
            group.gather(torch.ones(1, 1), [1, 1], torch.empty(1, 2), 0.2)
        except RankLostError as error:
            return str(error)
        finally:
            comes_late.set()
        return "did not notice"

    told, _ = on_all(make_groups(2, SECONDS), wait)
    assert "rank" in told
    assert told != "did not notice"


def test_a_rank_asks_whether_it_waits_in_vain() -> None:
    descriptor = shared_memory.new_memory(2)

    def check() -> None:
        raise RankLostError("rank 1 has ended")

    group = shared_memory.SharedMemoryGroup(0, 2, descriptor, SECONDS, check)
    with closing(group), pytest.raises(RankLostError, match="rank 1 has ended"):
        group.gather(torch.ones(1, 1), [1, 1], torch.empty(1, 2))


def test_ranks_agree_on_the_model_and_on_the_least(make_groups: MakeGroups) -> None:
    assert on_all(make_groups(2, SECONDS), lambda group: least(group, 7 - group.rank)) == [6, 6]
    assert least(ALONE, 5) == 5
    require_equal(ALONE, b"model")


def test_ranks_of_other_weights_are_refused() -> None:
    def refusal(group: Group) -> str:
        try:
            require_equal(group, b"other" if group.rank == 1 else b"model")
        except ConfigError as error:
            return str(error)
        return ""

    makers = [lambda group=group: group for group in in_process_groups(3, SECONDS)]  # type: ignore[misc]
    for told in on_all(makers, refusal):
        assert told.startswith("ranks 1 have other weights")
