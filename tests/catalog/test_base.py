"""What every store must do, whichever it is."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from lora_serve.catalog import plan
from lora_serve.catalog.base import CatalogStore
from lora_serve.catalog.records import Failure, Member, Record, Report

ONE = Member(replica_id="one:8000", address="http://one:8000", incarnation="1a")
TWO = Member(replica_id="two:8000", address="http://two:8000", incarnation="2a")


def record(name: str, digest: str = "aa", **fields: object) -> Record:
    return Record(name=name, digest=digest, source=f"/adapters/{name}", **fields)


def test_a_change_gets_a_serial_above_all_earlier_ones(store: CatalogStore) -> None:
    begin = store.snapshot().serial
    first, second = store.put(record("a"), 0), store.put(record("b"), 0)
    assert first is not None
    assert second is not None
    assert begin < first.serial < second.serial == store.snapshot().serial
    assert store.snapshot().records == (first, second)
    assert store.get("a") == first
    assert store.get("c") is None


def test_a_change_that_was_planned_on_an_earlier_record_is_refused(
    stores: list[CatalogStore],
) -> None:
    one, two = stores
    first = one.put(record("a"), 0)
    assert first is not None
    assert two.put(record("a", "bb"), 0) is None
    second = two.put(record("a", "bb"), first.serial)
    assert second is not None
    assert one.put(record("a", "cc"), first.serial) is None
    assert one.get("a") == second


def test_of_many_writers_at_once_one_is_first(stores: list[CatalogStore]) -> None:
    written: list[Record | None] = []

    def write(number: int) -> None:
        written.append(stores[number % 2].put(record("a", f"{number:02}"), 0))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (only,) = [one for one in written if one is not None]
    assert stores[0].get("a") == only


def test_all_changes_come_in_their_order_and_each_names_the_one_before(
    stores: list[CatalogStore],
) -> None:
    one, two = stores
    begin = one.snapshot().serial
    one.join(ONE)
    first = one.put(record("a"), 0)
    assert first is not None
    gone = two.put(replace(first, digest=""), first.serial)
    one.leave("one:8000")
    changes = two.changes(begin, 5)
    assert [change.previous for change in changes] == [
        begin,
        *(change.serial for change in changes[:-1]),
    ]
    assert [change.record for change in changes] == [None, first, gone, None]
    assert (changes[0].joined, changes[-1].left) == (ONE, "one:8000")
    assert two.changes(changes[-1].serial, 0.01) == []


def test_a_change_wakes_who_waits_for_it(stores: list[CatalogStore]) -> None:
    one, two = stores
    begin = one.snapshot().serial
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.extend(_awaited(two, begin)))
    waiter.start()
    written = one.put(record("a"), 0)
    waiter.join(60)
    assert [change.record for change in found] == [written]  # type: ignore[attr-defined]


def _awaited(store: CatalogStore, since: int) -> list[object]:
    for _ in range(60):  # a store may wait for less long than it is asked to
        if changes := store.changes(since, 1):
            return [*changes]
    return []


def come_and_gone(store: CatalogStore, name: str, **fields: object) -> Record:
    """The record of a name that was loaded and unloaded."""
    before = store.get(name)
    there = store.put(record(name, **fields), 0 if before is None else before.serial)
    assert there is not None
    gone = store.put(replace(there, digest=""), there.serial)
    assert gone is not None
    return gone


def test_a_name_that_was_unloaded_is_remembered_with_its_generation_or_as_a_module(
    store: CatalogStore,
) -> None:
    come_and_gone(store, "plain")
    reset = come_and_gone(store, "reset", generation=3)
    module = come_and_gone(store, "module", is_module=True)
    assert store.snapshot().records == (reset, module)
    assert store.get("plain") is None
    assert store.put(record("plain"), 0) is not None
    assert store.put(record("module"), 0) is None
    again = store.put(record("module"), module.serial)
    assert again is not None
    assert again.serial > module.serial
    assert again in store.snapshot().records


@pytest.mark.usefixtures("two_unloaded_are_kept")
def test_of_unloaded_names_the_latest_are_remembered_and_no_generation_comes_again(
    stores: list[CatalogStore],
) -> None:
    one, two = stores
    come_and_gone(one, "first", generation=7)
    again = come_and_gone(one, "again", is_module=True)
    loaded = two.put(record("again", is_module=True), again.serial)
    kept = [come_and_gone(two, name, is_module=True) for name in ("m", "n")]
    assert one.snapshot().records == (loaded, *kept), "what was loaded again is not forgotten"
    assert one.snapshot().first_generation == 7
    for name in ("first", "new"):
        current = two.get(name)
        assert current == Record(name=name, generation=7)
        planned = plan.loading(record(name), load_inplace=False)(current)
        written = two.put(planned, current.serial)
        assert written is not None
        assert written.generation == 7
        assert two.put(replace(written, digest=""), written.serial) is not None
    assert one.snapshot().records == (loaded, *kept), (
        "7 is what a name without a record begins with"
    )
    assert one.get("new") == Record(name="new", generation=7)


def test_a_replica_is_registered_until_it_leaves(store: CatalogStore) -> None:
    store.join(TWO)
    store.join(ONE)
    assert [one.member for one in store.standings()] == [ONE, TWO]
    assert store.snapshot().members == (ONE, TWO)
    assert not store.leave("one:8000", "another process")
    assert store.leave("one:8000", "1a")
    assert not store.leave("one:8000")
    assert store.renew(ONE, Report(serial=1)) is None
    assert [one.member for one in store.standings()] == [TWO]


def test_a_report_is_told_to_all_until_another_process_takes_the_place(
    stores: list[CatalogStore],
) -> None:
    one, two = stores
    one.join(ONE)
    report = Report(serial=7, loading={"a": 7}, failed={"b": Failure(6, "no such file “b”")})
    assert one.renew(ONE, report) == ONE
    (standing,) = two.standings()
    assert (standing.report, standing.silent_seconds < 60) == (report, True)
    again = replace(ONE, incarnation="1b")
    two.join(again)
    assert [each.report for each in one.standings()] == [Report()]
    assert one.renew(ONE, report) == again
    assert [each.report for each in one.standings()] == [Report()]


def test_reports_wake_who_waits_for_them(stores: list[CatalogStore]) -> None:
    one, two = stores
    one.join(ONE)
    seen = two.await_reports(-1, 5)
    assert two.await_reports(seen, 0.01) == seen
    one.renew(ONE, Report(serial=1))
    number = two.await_reports(seen, 5)
    assert number > seen
    one.renew(ONE, Report(serial=1))  # which says nothing new
    assert two.await_reports(number, 0.01) == number
    two.join(TWO)
    assert two.await_reports(number, 5) > number
