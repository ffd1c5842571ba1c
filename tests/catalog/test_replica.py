"""Replicas at work over one store in memory, with engines of tests/fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lora_serve.catalog import plan
from lora_serve.catalog import replica as replica_module
from lora_serve.catalog.records import Member, Record
from lora_serve.catalog.replica import CatalogReplica
from lora_serve.catalog.rollout import State
from lora_serve.errors import (
    AdapterUnavailableError,
    CatalogRefusedError,
    CatalogUnavailableError,
    ChangeUnknownError,
    InvalidRequestError,
    NotFoundError,
)
from tests.fakes.catalog_store import MemoryStore
from tests.fakes.engine import FakeEngine, write_adapter

PATIENCE = 60


@pytest.fixture(autouse=True)
def swift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "RETRY_STORE_SECONDS", 0.02)
    monkeypatch.setattr(replica_module, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(replica_module, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(replica_module, "ASK_SECONDS", 0.2)
    monkeypatch.setattr("lora_serve.catalog.engine_work.RETRY_SECONDS", 0.05)
    monkeypatch.setattr("lora_serve.catalog.rollout_watch.WATCH_SECONDS", 0.05)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def started(
    store: MemoryStore, name: str, incarnation: str = "1", **options: object
) -> AsyncIterator[tuple[CatalogReplica, FakeEngine]]:
    engine = FakeEngine()
    member = Member(replica_id=name, address=f"http://{name}", incarnation=incarnation)
    async with CatalogReplica(store, engine, member, **options).running() as replica:
        await until(lambda: replica.view.is_current or store.is_cut)
        yield replica, engine


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_true():
            await asyncio.sleep(0.01)


async def load(replica: CatalogReplica, engine: FakeEngine, name: str, path: str) -> Record:
    info = await engine.examine_lora_adapter(name, path)
    wish = Record(name=name, digest=info.digest, source=path)
    return await replica.changes.make(name, plan.loading(wish, load_inplace=True))


def digest_of(engine: FakeEngine, name: str) -> str | None:
    info = engine.adapter(name)
    return None if info is None else info.digest


async def test_a_load_reset_and_unload_on_one_are_everywhere_when_they_have_rolled_out(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    path = write_adapter(tmp_path / "a", "ALPHA")
    async with started(store, "one") as (one, ours), started(store, "two") as (two, theirs):
        record = await load(one, ours, "a", path)
        rollout = await one.rolled_out(record, PATIENCE)
        assert rollout.is_everywhere
        assert digest_of(ours, "a") == digest_of(theirs, "a") == record.digest
        assert await two.admit("a")
        reset = await two.changes.make("a", plan.resetting(Record(name="a")))
        assert (await two.rolled_out(reset, PATIENCE)).is_everywhere
        assert (ours.resets, theirs.resets) == (["a"], ["a"])
        assert reset.generation == 1
        gone = await one.changes.make("a", plan.unloading(Record(name="a")))
        assert (await one.rolled_out(gone, PATIENCE)).is_everywhere
        assert ours.adapter("a") is theirs.adapter("a") is None
        assert not await two.admit("a")


async def test_a_late_replica_has_what_was_loaded_before_and_requests_wait_for_it(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    async with started(store, "one") as (one, ours):
        for name in "abc":
            await load(one, ours, name, write_adapter(tmp_path / name, name))
        async with started(store, "two") as (two, theirs):
            assert await two.admit("b")
            assert theirs.adapter("b") is not None
            await until(lambda: set(two.view.ready()) == {"a", "b", "c"})


async def test_a_replica_without_the_bytes_says_so_and_takes_no_requests_until_it_has_them(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    first, second = (write_adapter(tmp_path / name, name) for name in ("v1", "v2"))
    async with started(store, "one") as (one, ours), started(store, "two") as (two, theirs):
        assert (await one.rolled_out(await load(one, ours, "a", first), PATIENCE)).is_everywhere
        record = Record(name="a", digest="ab" * 32, source=second)
        written = await one.changes.make("a", plan.loading(record, load_inplace=True))
        rollout = await one.rolled_out(written, PATIENCE)
        assert [state.state for state in rollout.replicas] == [State.FAILED, State.FAILED]
        assert "has another digest than" in str(rollout)
        assert theirs.adapter("a") is None, "the old version must not be there to answer"
        with pytest.raises(AdapterUnavailableError, match=r"digest abababababab, found [0-9a-f]+"):
            await two.admit("a")
        found = (await theirs.examine_lora_adapter("a", second)).digest
        mended = Record(name="a", digest=found, source=second)
        again = await two.changes.make("a", plan.loading(mended, load_inplace=True))
        assert (await two.rolled_out(again, PATIENCE)).is_everywhere
        assert await one.admit("a")


async def test_files_that_come_late_are_found(tmp_path: Path) -> None:
    store = MemoryStore()
    path = tmp_path / "late"
    async with started(store, "one") as (one, ours):
        record = await load(one, ours, "a", write_adapter(path, "ALPHA"))
        assert (await one.rolled_out(record, PATIENCE)).is_everywhere
        path.rename(tmp_path / "away")
        async with started(store, "two") as (two, _):
            await until(lambda: "a" in two.view.failed)
            (tmp_path / "away").rename(path)
            assert (await one.rolled_out(record, 0.1)).record == record
            await until(lambda: "a" in two.view.ready())
            assert await two.admit("a")


async def test_the_loss_of_the_store_stops_changes_and_no_answers(tmp_path: Path) -> None:
    store = MemoryStore()
    path = write_adapter(tmp_path / "a", "ALPHA")
    async with started(store, "one") as (one, ours), started(store, "two") as (two, theirs):
        await one.rolled_out(await load(one, ours, "a", path), PATIENCE)
        store.is_cut = True
        await until(lambda: not one.is_store_up and not two.is_store_up)
        with pytest.raises(CatalogUnavailableError, match="nothing was changed anywhere"):
            await load(one, ours, "a", write_adapter(tmp_path / "b", "BETA"))
        assert await one.admit("a")
        assert await two.admit("a")
        store.is_cut = False
        record = await load(one, ours, "a", write_adapter(tmp_path / "c", "GAMMA"))
        assert (await one.rolled_out(record, PATIENCE)).is_everywhere
        assert digest_of(theirs, "a") == record.digest


async def test_a_store_that_refuses_a_change_has_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CatalogRefusedError("the catalog's memory is full")

    store = MemoryStore()
    async with started(store, "one") as (one, ours):
        monkeypatch.setattr(store, "put", refuse)
        with pytest.raises(CatalogUnavailableError, match="full; nothing was changed") as told:
            await load(one, ours, "a", write_adapter(tmp_path / "a", "ALPHA"))
    assert not isinstance(told.value, ChangeUnknownError)


async def test_a_replica_that_starts_without_the_store_serves_once_it_answers(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    async with started(store, "one") as (one, ours):
        await load(one, ours, "a", write_adapter(tmp_path / "a", "ALPHA"))
        store.is_cut = True
        async with started(store, "two") as (two, _):
            with pytest.raises(CatalogUnavailableError, match="has not told this server") as caught:
                await two.admit("a")
            assert store.where not in str(caught.value), "its place is not for users"
            with pytest.raises(CatalogUnavailableError):
                two.check_ready()
            store.is_cut = False
            await until(lambda: two.view.is_current)
            two.check_ready()
            assert await two.admit("a")


@pytest.mark.parametrize("call", ["snapshot", "renew", "changes", "await_reports"])
async def test_a_bug_in_one_answer_of_the_store_does_not_end_what_follows_it(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, num_failures = MemoryStore(), 2
    real = getattr(store, call)

    def failing(*arguments: object) -> object:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise RuntimeError("a bug")
        return real(*arguments)

    monkeypatch.setattr(store, call, failing)
    async with started(store, "one") as (one, engine), started(store, "two") as (two, other):
        path = write_adapter(tmp_path / "a", "ALPHA")
        record = await load(one, engine, "a", path)
        assert (await two.rolled_out(record, PATIENCE)).is_everywhere
        assert digest_of(other, "a") == record.digest
    assert "the catalog is followed anew" in caplog.text


async def test_a_store_that_answers_for_ever_holds_up_no_request_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte each second keeps every timeout of a socket, and the thread that reads it."""
    monkeypatch.setattr(replica_module, "STORE_SECONDS", 0.2)
    store, closed = MemoryStore(), threading.Event()
    monkeypatch.setattr(store, "close", closed.set)
    async with asyncio.timeout(PATIENCE), started(store, "one") as (one, engine):
        record = await load(one, engine, "a", write_adapter(tmp_path / "a", "ALPHA"))
        await one.wait_until_known(record)
        for call in ("get", "renew", "changes", "leave"):
            monkeypatch.setattr(store, call, lambda *_: closed.wait())
        with pytest.raises(
            CatalogUnavailableError, match=r"no whole answer within 0\.2 s; nothing"
        ):
            await load(one, engine, "a", str(tmp_path / "a"))
        await until(lambda: not one.is_store_up)
        assert await one.admit("a")


async def test_a_replica_that_slept_asks_before_it_admits(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with started(store, "one", clock=clock) as (one, ours):
        await one.rolled_out(await load(one, ours, "a", write_adapter(tmp_path / "a", "A")), 9)
        clock.now += 60
        store.is_cut = True
        with pytest.raises(CatalogUnavailableError):
            await one.admit("a")
        store.is_cut = False
        await until(lambda: one.view.is_current)
        assert await one.admit("a")


async def test_the_log_says_whether_requests_go_on_without_the_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, clock = MemoryStore(), Clock()

    def warnings() -> list[str]:
        return [one.message for one in caplog.records if one.levelname == "WARNING"]

    async with started(store, "one", clock=clock) as (one, _):
        store.is_cut = True
        await until(warnings)
        assert [" requests go on," in line for line in warnings()] == [True]
        clock.now += 60
        one.view.note_awake(clock.now)
        await until(lambda: len(warnings()) == 2)
        assert "requests for adapters are refused" in warnings()[1]
        async with started(store, "two"):
            await until(lambda: len(warnings()) == 3)
            assert "requests for adapters are refused" in warnings()[2]
        store.is_cut = False
        await until(lambda: one.view.is_current)
        assert len(warnings()) == 3


async def test_the_dead_stay_named_until_they_are_forgotten(tmp_path: Path) -> None:
    store = MemoryStore()
    store.join(Member(replica_id="dead", address="http://dead", incarnation="1"))
    store.silent["dead"] = 3.0
    async with started(store, "one") as (one, ours):
        record = await load(one, ours, "a", write_adapter(tmp_path / "a", "ALPHA"))
        assert str(await one.rolled_out(record, 0.1)).endswith("not on dead (behind)")
        with pytest.raises(InvalidRequestError, match="was heard from 3 s ago"):
            await one.changes.forget("dead")
        store.silent["dead"] = 60.0
        assert "not heard from: for 60 s" in str(await one.rolled_out(record, PATIENCE))
        await one.changes.forget("dead")
        assert (await one.rolled_out(record, PATIENCE)).is_everywhere
        with pytest.raises(NotFoundError):
            await one.changes.forget("dead")


async def test_a_second_process_with_the_same_id_takes_the_place_of_the_first(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    async with started(store, "one") as (one, ours):
        record = await load(one, ours, "a", write_adapter(tmp_path / "a", "ALPHA"))
        assert (await one.rolled_out(record, PATIENCE)).is_everywhere
        assert await one.admit("a")
        async with started(store, "one", incarnation="2") as (two, _):
            assert await two.admit("a")
            await until(lambda: not one.view.is_current)
            with pytest.raises(CatalogUnavailableError, match="a --lora-replica-id of its own"):
                await one.admit("a")
            assert [each.member for each in await two.changes.standings()] == [two.member]


async def test_a_replica_that_ends_signs_off() -> None:
    store = MemoryStore()
    async with started(store, "one"):
        assert len(store.standings()) == 1
    assert store.standings() == []
