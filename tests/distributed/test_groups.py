"""Every kind of group puts the ranks' parts side by side, and none waits without an end."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from lora_serve.distributed import shared_memory, torch_group
from lora_serve.distributed.agreement import least, require_equal
from lora_serve.distributed.card_group import CardGroup, StreamGroup
from lora_serve.distributed.group import ALONE, Group, broadcast, exchange
from lora_serve.distributed.in_process import in_process_groups
from lora_serve.distributed.limits import RankLimits, TimeLimit
from lora_serve.distributed.torch_group import TorchGroup
from lora_serve.errors import ConfigError, RankLostError

SECONDS = 60.0


def limits_of(step: float, load: float = SECONDS) -> RankLimits:
    return RankLimits(TimeLimit(step, "--step-timeout"), TimeLimit(load, "--engine-ready-timeout"))


LIMITS = limits_of(SECONDS)
MakeGroups = Callable[[int, RankLimits], Sequence[Callable[[], Group]]]


def in_shared_memory(world_size: int, limits: RankLimits) -> list[Callable[[], Group]]:
    descriptor = shared_memory.new_memory(world_size)

    def make(rank: int) -> Group:
        return shared_memory.SharedMemoryGroup(rank, world_size, os.dup(descriptor), limits)

    return [lambda rank=rank: make(rank) for rank in range(world_size)]  # type: ignore[misc]


def on_streams(world_size: int, directory: Path) -> list[Callable[[], Group]]:
    """The groups of cards, by the calls that NCCL gets, which gloo does for tensors of the CPU."""
    hosts = in_process_groups(world_size, LIMITS)

    def make(rank: int) -> Group:
        stream = StreamGroup(rank, world_size, directory / "cards", LIMITS)
        return CardGroup(stream, hosts[rank], torch.device("cpu"))

    return [lambda rank=rank: make(rank) for rank in range(world_size)]  # type: ignore[misc]


@pytest.mark.skipif(not shared_memory.is_supported(), reason="ranks meet otherwise")
def test_ranks_that_others_wait_for_can_be_seen() -> None:
    descriptor = shared_memory.new_memory(3)
    groups = [shared_memory.SharedMemoryGroup(rank, 3, descriptor, LIMITS) for rank in range(3)]
    with closing(shared_memory.Counters(descriptor, 3)) as counters, ThreadPoolExecutor() as pool:
        assert counters.late_ranks() == []
        begun = []
        for group, late in zip(groups, ([1, 2], [2], []), strict=True):
            begun.append(pool.submit(exchange, group, b"rank"))
            deadline = time.monotonic() + SECONDS
            while counters.late_ranks() != late:
                assert time.monotonic() < deadline
        assert [each.result() for each in begun] == [[b"rank"] * 3] * 3
        assert counters.late_ranks() == []
    for group in groups:
        group.close()
    os.close(descriptor)


@pytest.fixture(params=["threads", "shared_memory", "gloo", "streams"])
def make_groups(request: pytest.FixtureRequest, tmp_path: Path) -> MakeGroups:
    def make(world_size: int, limits: RankLimits) -> Sequence[Callable[[], Group]]:
        match request.param:
            case "threads":
                groups = in_process_groups(world_size, limits)
                return [lambda group=group: group for group in groups]  # type: ignore[misc]
            case "shared_memory":
                if not shared_memory.is_supported():
                    pytest.skip("this processor does not show writes in their order")
                return in_shared_memory(world_size, limits)
            case "streams":
                return on_streams(world_size, tmp_path)
            case _:
                return [
                    lambda rank=rank: TorchGroup(rank, world_size, tmp_path / "store", limits)  # type: ignore[misc]
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

    for results in on_all(make_groups(3, LIMITS), gather_often):
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

    assert on_all(make_groups(3, LIMITS), exchange_often) == [[True] * 5] * 3


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

    for whole in on_all(in_shared_memory(2, LIMITS), gather):
        assert torch.equal(whole, expected)


def gather_in_common(group: Group, turns: int, pause: Callable[[Group], None]) -> list[bool]:
    """Whether each of some gathers in common rows gave the right ones, read after a pause."""
    widths, right = [3, 0, 7], []
    for turn in range(turns):
        whole = group.common_rows(5, 10, torch.bfloat16)
        assert whole is not None
        parts = [part_of(r, w, 5, torch.bfloat16, turn) for r, w in enumerate(widths)]
        group.gather(parts[group.rank], widths, whole)
        pause(group)
        right.append(torch.equal(whole, torch.cat(parts, dim=1)))
        if turn % 3 == 2:
            assert exchange(group, b"between") == [b"between"] * 3
    return right


@pytest.mark.parametrize("kind", [in_shared_memory, in_process_groups])
def test_common_rows_are_good_until_the_next_call(kind: Any) -> None:
    """Also where nothing is gathered between, and a rank is slower than others to read them."""
    groups = kind(3, LIMITS)
    makers = groups if kind is in_shared_memory else [lambda g=group: g for group in groups]

    def pause(group: Group) -> None:
        if group.rank == 2:
            time.sleep(0.01)

    found = on_all(makers, lambda group: gather_in_common(group, 9, pause))
    assert found == [[True] * 9] * 3


def test_common_rows_that_are_written_while_others_read_them_would_show() -> None:
    """A mutant: no rank waits for the others before it writes."""

    def pause(group: Group) -> None:
        assert isinstance(group, shared_memory.SharedMemoryGroup)
        group._last_of_common = -1
        if group.rank == 2:
            time.sleep(0.2)

    found = on_all(in_shared_memory(3, LIMITS), lambda group: gather_in_common(group, 2, pause))
    assert found[2] == [False, True]


def test_there_are_no_common_rows_for_more_than_they_hold(
    make_groups: MakeGroups, request: pytest.FixtureRequest
) -> None:
    group = make_groups(1, LIMITS)[0]()
    has_some = request.node.callspec.params["make_groups"] in ("threads", "shared_memory")
    assert (group.common_rows(2, 3, torch.bfloat16) is not None) == has_some
    assert group.common_rows(1, shared_memory.COMMON_BYTES + 1, torch.uint8) is None
    assert ALONE.common_rows(1, 1, torch.uint8) is None


def test_a_group_is_closed_while_a_recorded_step_has_its_common_rows() -> None:
    group = in_shared_memory(1, LIMITS)[0]()
    rows = group.common_rows(2, 2, torch.float32)
    assert rows is not None
    group.close()
    assert rows.fill_(3.0).sum() == 12.0


def test_values_of_any_length_are_exchanged(make_groups: MakeGroups) -> None:
    def swap(group: Group) -> list[bytes]:
        return exchange(group, b"rank" * group.rank)

    assert on_all(make_groups(3, LIMITS), swap) == [[b"", b"rank", b"rankrank"]] * 3


def test_the_first_rank_tells_the_others(make_groups: MakeGroups) -> None:
    def told(group: Group) -> list[int]:
        return broadcast(group, torch.arange(4) * (10 if group.rank == 0 else 1)).tolist()

    assert on_all(make_groups(2, LIMITS), told) == [[0, 10, 20, 30]] * 2
    assert broadcast(ALONE, torch.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("while_loading", [False, True], ids=["in a step", "while loading"])
def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(
    make_groups: MakeGroups, request: pytest.FixtureRequest, while_loading: bool
) -> None:
    """What is told names the seconds, and the flag that allows more."""
    if request.node.callspec.params["make_groups"] == "streams":
        pytest.skip("a stream waits, and whoever waits for its end finds it (test_rank_cards.py)")
    comes_late = threading.Event()

    def wait(group: Group) -> str:
        if group.rank == 1:
            comes_late.wait(SECONDS)
            return ""
        try:
            whole = torch.empty(1, 2)
            group.gather(torch.ones(1, 1), [1, 1], whole, while_loading=while_loading)
        except RankLostError as error:
            return str(error)
        finally:
            comes_late.set()
        return "did not notice"

    limits = limits_of(SECONDS, 0.2) if while_loading else limits_of(0.2)
    told, _ = on_all(make_groups(2, limits), wait)
    flag = "--engine-ready-timeout" if while_loading else "--step-timeout"
    assert f"0.2 s; raise {flag} if it may take longer" in told


def test_a_load_may_take_longer_than_ranks_have_to_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo ends by a limit of its own what is waited for with a longer one."""
    monkeypatch.setattr(torch_group, "CONNECT_SECONDS", 1.0)

    def load(group: Group) -> list[bytes]:
        if group.rank:
            time.sleep(2.5)
        return exchange(group, b"rank")

    path, limits = tmp_path / "store", limits_of(0.5)
    makers = [lambda rank=rank: TorchGroup(rank, 2, path, limits) for rank in (0, 1)]  # type: ignore[misc]
    assert on_all(makers, load) == [[b"rank"] * 2] * 2


def test_a_rank_asks_whether_it_waits_in_vain() -> None:
    descriptor = shared_memory.new_memory(2)

    def check() -> None:
        raise RankLostError("rank 1 has ended")

    group = shared_memory.SharedMemoryGroup(0, 2, descriptor, LIMITS, check)
    with closing(group), pytest.raises(RankLostError, match="rank 1 has ended"):
        group.gather(torch.ones(1, 1), [1, 1], torch.empty(1, 2))


def test_ranks_agree_on_the_model_and_on_the_least(make_groups: MakeGroups) -> None:
    assert on_all(make_groups(2, LIMITS), lambda group: least(group, 7 - group.rank)) == [6, 6]
    assert least(ALONE, 5) == 5
    require_equal(ALONE, b"model")


def test_ranks_of_other_weights_are_refused() -> None:
    def refusal(group: Group) -> str:
        try:
            require_equal(group, b"other" if group.rank == 1 else b"model")
        except ConfigError as error:
            return str(error)
        return ""

    makers = [lambda group=group: group for group in in_process_groups(3, LIMITS)]  # type: ignore[misc]
    for told in on_all(makers, refusal):
        assert told.startswith("rank 1 has other weights")


def test_what_lies_on_a_card_goes_by_cards_and_the_rest_by_hosts() -> None:
    """Kinds of devices stand for the two here: one of them holds no values."""
    met: list[tuple[str, torch.Size]] = []

    class Noted:
        rank, world_size = 0, 2

        def __init__(self, name: str) -> None:
            self.name = name

        def gather(self, part: Tensor, *_: object, **__: object) -> None:
            met.append((self.name, part.shape))

        def all_to_all(self, rows: Tensor, *_: object) -> None:
            met.append((self.name, rows.shape))

        def common_rows(self, *_: object) -> None: ...

        def close(self) -> None:
            met.append((self.name, torch.Size()))

    card = torch.device("meta")
    group = CardGroup(Noted("cards"), Noted("hosts"), card)
    assert [name for name, _ in met] == ["cards"] * 2, "NCCL has its memory before it is measured"
    met.clear()
    for place in (card, torch.device("cpu")):
        part, whole = torch.empty(2, 3, device=place), torch.empty(2, 6, device=place)
        group.gather(part, [3, 3], whole)
        group.all_to_all(whole, [range(3), range(3, 6)], whole.view(2, 2, 3))
    group.close()
    assert [name for name, _ in met] == [*["cards"] * 2, *["hosts"] * 2, "cards", "hosts"]


def test_a_stream_is_asked_for_an_exchange_and_not_waited_for(tmp_path: Path) -> None:
    """NCCL has the host wait where there is a limit; and asynchronous work has another stream."""
    waited: list[tuple[object, ...]] = []

    class Work:
        def wait(self, *limit: object) -> None:
            waited.append(limit)

    class Backend:
        def _allgather_base(self, taken: Tensor, own: Tensor, options: Any) -> Work:
            assert taken.dtype == own.dtype == torch.uint8
            assert (taken.numel(), own.numel()) == (2 * 5 * 3 * 2, 5 * 3 * 2), "the longest part"
            assert not options.asyncOp
            return Work()

        def alltoall_base(self, taken: Tensor, sent: Tensor, *how: Any) -> Work:
            assert how[:2] == ([20, 20], [20, 20])
            assert not how[2].asyncOp
            return Work()

        def abort(self) -> None:
            waited.append(("abort",))

    group = StreamGroup(0, 2, tmp_path / "store", LIMITS, lambda *_: Backend())  # type: ignore[arg-type,return-value]
    rows, dtype = 5, torch.bfloat16
    group.gather(torch.ones(rows, 2, dtype=dtype), [2, 3], torch.empty(rows, 5, dtype=dtype))
    both = torch.empty(rows, 4, dtype=dtype)
    group.all_to_all(both, [range(2), range(2, 4)], both.new_empty(2, rows, 2))
    group.close()
    assert waited == [(), (), ("abort",)]


def test_parts_in_another_order_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of what cards exchange."""
    all_gather = StreamGroup._all_gather

    def turned(group: StreamGroup, taken: Tensor, own: Tensor, limit: TimeLimit) -> None:
        all_gather(group, taken, own, limit)
        taken.copy_(taken.view(group.world_size, -1).roll(1, dims=0).flatten())

    monkeypatch.setattr(StreamGroup, "_all_gather", turned)
    with pytest.raises(AssertionError):
        test_parts_stand_side_by_side_in_the_order_of_ranks(
            lambda size, _: on_streams(size, tmp_path), torch.bfloat16
        )


def test_ranks_gather_where_the_kernel_has_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Map(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(shared_memory.mmap, "mmap", Map)
    group = shared_memory.SharedMemoryGroup(0, 1, shared_memory.new_memory(1), LIMITS)
    group.close()
