from __future__ import annotations

import pytest

from lora_serve.catalog.records import Change, Failure, Member, Record, Snapshot
from lora_serve.catalog.view import Admission, CatalogView, Work

ME = Member(replica_id="me", address="http://me", incarnation="1")
OTHER = Member(replica_id="other", address="http://other", incarnation="1")


def record(name: str, serial: int, digest: str = "aa", **fields: object) -> Record:
    return Record(name=name, serial=serial, digest=digest, source=f"/{digest}", **fields)


def view_of(*records: Record, serial: int = 10) -> CatalogView:
    """What has heard of these, and done nothing yet."""
    view = CatalogView(ME)
    view.note_awake(0.0)
    assert view.take_snapshot(Snapshot(serial=serial, records=records, members=(ME,)))
    return view


def change(serial: int, record: Record | None = None, **fields: object) -> Change:
    return Change(serial=serial, previous=serial - 1, record=record, **fields)


def do_all(view: CatalogView) -> list[Work]:
    works = view.take_work(100)
    for work in works:
        view.note_done(work.record)
        view.check_invariants()
    return works


def test_nothing_is_admitted_before_the_store_has_told_what_there_is() -> None:
    view = CatalogView(ME)
    assert view.admission("a", 0.0) is Admission.ASK
    assert not view.take_snapshot(Snapshot(serial=3, members=(OTHER,)))
    assert view.admission("a", 0.0) is Admission.ASK
    assert view.take_snapshot(Snapshot(serial=4, members=(ME, OTHER)))
    assert view.admission("a", 0.0) is Admission.UNKNOWN


def test_a_late_replica_takes_requests_for_a_name_once_its_engine_has_it() -> None:
    view = view_of(record("a", 3), record("b", 4))
    assert view.admission("a", 0.0) is Admission.WAIT
    assert view.report().loading == {"a": 3, "b": 4}
    first, second = view.take_work(100)
    assert (first.record.name, first.before) == ("a", None)
    view.note_done(first.record)
    assert view.admission("a", 0.0) is Admission.ADMIT
    assert view.admission("b", 0.0) is Admission.WAIT
    assert (view.report().loading, view.ready()) == ({"b": 4}, {"a": 3})
    view.note_done(second.record)
    assert (view.report().loading, view.report().serial) == ({}, 10)


def test_the_name_that_requests_wait_for_is_next() -> None:
    view = view_of(*(record(f"n{number}", number + 1) for number in range(5)))
    (running,) = view.take_work(1)
    view.prefer("n3")
    assert view.take_work(1) == []
    view.note_done(running.record)
    assert [work.record.name for work in view.take_work(2)] == ["n3", "n1"]


def test_the_old_version_answers_until_the_new_one_is_done() -> None:
    view = view_of(record("a", 3))
    do_all(view)
    assert view.take_change(change(11, record("a", 11, "bb")))
    assert view.admission("a", 0.0) is Admission.ADMIT
    assert view.report().loading == {"a": 11}
    (work,) = view.take_work(4)
    assert (work.record.serial, work.before) == (11, record("a", 3))
    assert view.admission("a", 0.0) is Admission.ADMIT
    view.note_done(work.record)
    assert (view.report().loading, view.ready()) == ({}, {"a": 11})


def test_a_change_while_the_one_before_is_loaded_is_done_after_it() -> None:
    view = view_of(record("a", 3))
    (first,) = view.take_work(4)
    view.take_change(change(11, record("a", 11, "bb")))
    assert view.take_work(4) == []
    view.note_done(first.record)
    assert view.report().loading == {"a": 11}
    assert [work.record.serial for work in do_all(view)] == [11]
    assert view.report().loading == {}


def test_a_change_to_the_same_version_needs_no_work() -> None:
    view = view_of(record("a", 3))
    do_all(view)
    view.take_change(change(11, record("a", 11, by="someone")))
    assert (view.take_work(4), view.ready()) == ([], {"a": 11})


def test_what_follows_a_gap_is_not_taken() -> None:
    view = view_of(record("a", 3))
    do_all(view)
    missed = Change(serial=12, previous=11, record=record("a", 12, "cc"))
    assert not view.take_change(missed)
    assert (view.serial, view.report().serial, view.take_work(4)) == (10, 10, [])
    assert view.take_change(change(9, record("a", 9, "old")))  # known long since
    assert view.take_work(4) == []


def test_after_a_snapshot_a_replaced_name_waits_and_a_missing_one_is_taken_away() -> None:
    view = view_of(record("a", 3), record("b", 4), record("c", 5))
    do_all(view)
    view.take_snapshot(
        Snapshot(serial=20, records=(record("a", 3), record("b", 15, "bb")), members=(ME,))
    )
    admissions = [view.admission(name, 0.0) for name in "abc"]
    assert admissions == [Admission.ADMIT, Admission.WAIT, Admission.UNKNOWN]
    works = do_all(view)
    assert {work.record.name: work.record.digest for work in works} == {"b": "bb", "c": ""}
    assert view.ready() == {"a": 3, "b": 15}


def test_a_name_that_cannot_be_served_takes_no_requests_until_it_can() -> None:
    view = view_of(record("a", 3))
    do_all(view)
    view.take_change(change(11, record("a", 11, "bb")))
    (work,) = view.take_work(4)
    view.note_failed(work.record, Failure(work.record.serial, "no such file"))
    view.check_invariants()
    assert view.admission("a", 0.0) is Admission.REFUSE
    assert view.report().failed == {"a": Failure(11, "no such file")}
    view.retry("a")
    (again,) = view.take_work(4)
    assert again == Work(work.record, None)
    assert view.admission("a", 0.0) is Admission.REFUSE
    view.note_done(again.record)
    view.check_invariants()
    assert (view.admission("a", 0.0), view.report().failed) == (Admission.ADMIT, {})


def test_the_next_change_of_a_name_that_failed_is_tried() -> None:
    view = view_of(record("a", 3))
    (work,) = view.take_work(4)
    view.take_change(change(11, record("a", 11, "bb")))
    view.note_failed(
        work.record, Failure(work.record.serial, "no such file")
    )  # of the one that is replaced
    assert view.report().failed == {}
    assert [work.record.serial for work in do_all(view)] == [11]


def test_an_unloaded_name_is_taken_away_and_its_generation_stays_known() -> None:
    view = view_of(record("a", 3), record("b", 4, generation=2))
    do_all(view)
    view.take_change(change(11, record("a", 11, "")))
    view.take_change(change(12, record("b", 12, "", generation=2)))
    assert [work.record.is_unloaded for work in do_all(view)] == [True, True]
    assert (view.ready(), [*view.records()]) == ({}, [])
    assert [(one.name, one.generation) for one in view.snapshot().records] == [("b", 2)]


@pytest.mark.usefixtures("two_unloaded_are_kept")
def test_of_unloaded_names_the_latest_stay_known_and_the_highest_generation() -> None:
    view = view_of(serial=1)
    for number, name in enumerate("abc"):
        gone = Record(name=name, serial=2 + number, generation=9 - number, is_module=name == "c")
        view.take_change(Change(serial=gone.serial, previous=gone.serial - 1, record=gone))
        view.check_invariants()
    told = view.snapshot()
    assert [one.name for one in told.records] == ["b", "c"]
    assert told.first_generation == 9
    last = view.last_record("c")
    assert last is not None
    assert last.is_module
    assert view.record("c") is view.last_record("a") is None
    view.take_snapshot(Snapshot(serial=9, members=(ME,), first_generation=8))
    assert view.snapshot() == Snapshot(serial=9, members=(ME,), first_generation=9)
    view.check_invariants()


def test_a_replica_that_slept_asks_first() -> None:
    view = view_of(record("a", 3))
    do_all(view)
    view.note_awake(2.0)
    assert view.admission("a", 6.9) is Admission.ADMIT
    assert view.admission("a", 7.1) is Admission.ASK
    view.note_awake(7.2)  # whichever runs first after the sleep
    assert view.admission("a", 7.2) is Admission.ASK
    view.take_change(change(11, record("a", 11, "bb")))
    assert view.take_snapshot(Snapshot(serial=11, records=(record("a", 11, "bb"),), members=(ME,)))
    assert view.admission("a", 7.3) is Admission.WAIT  # not the version of before
    do_all(view)
    assert view.admission("a", 7.4) is Admission.ADMIT


def test_attempts_that_fail_stop_no_answers() -> None:
    view = view_of(record("a", 3))
    do_all(view)
    for second in range(1, 100):
        view.note_awake(float(second))
    assert view.admission("a", 100.0) is Admission.ADMIT


def test_a_replica_that_was_forgotten_or_replaced_asks_first() -> None:
    for gone in (
        change(11, left="me"),
        change(11, joined=Member(replica_id="me", address="", incarnation="2")),
    ):
        view = view_of(record("a", 3))
        do_all(view)
        view.take_change(change(11, joined=OTHER) if gone is None else gone)
        assert view.admission("a", 0.0) is Admission.ASK
