"""The oracle finds nothing wrong with the catalog, and finds each bug that is put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from lora_serve.catalog import plan
from lora_serve.catalog.records import Change, Record, Report, Snapshot, Standing
from lora_serve.catalog.rollout import Rollout, State
from lora_serve.catalog.view import Admission, CatalogView, Work
from tests.catalog import oracle
from tests.catalog.oracle import Fleet, Replica
from tests.fakes.catalog_store import MemoryStore

NUM_LIVES = 60
NUM_MUTANT_LIVES = 400
NUM_STEPS = 500


def test_no_answer_is_of_a_version_that_was_replaced_everywhere() -> None:
    num_answers = num_claims = 0
    for seed in range(NUM_LIVES):
        fleet = Fleet(seed)
        fleet.live(NUM_STEPS)
        num_answers += fleet.num_answers
        num_claims += fleet.num_claims
    assert num_answers > 20 * NUM_LIVES
    assert num_claims > NUM_LIVES


def live(num_lives: int) -> None:
    for seed in range(num_lives):
        Fleet(seed).live(NUM_STEPS)


Patch = Callable[[pytest.MonkeyPatch], None]


def one_replica_is_enough(patch: pytest.MonkeyPatch) -> None:
    def is_everywhere(rollout: Rollout) -> bool:
        return any(one.state is State.READY for one in rollout.replicas)

    patch.setattr(Rollout, "is_everywhere", property(is_everywhere))


def silent_replicas_do_not_count(patch: pytest.MonkeyPatch) -> None:
    def is_everywhere(rollout: Rollout) -> bool:
        return all(one.state in (State.READY, State.SILENT) for one in rollout.replicas)

    patch.setattr(Rollout, "is_everywhere", property(is_everywhere))


def admitted_before_the_store_was_asked(patch: pytest.MonkeyPatch) -> None:
    real = CatalogView.__init__

    def init(view: CatalogView, *arguments: object) -> None:
        real(view, *arguments)  # type: ignore[arg-type]
        view._is_current = True

    patch.setattr(CatalogView, "__init__", init)


def admitted_before_it_caught_up(patch: pytest.MonkeyPatch) -> None:
    real = CatalogView._want

    def want(view: CatalogView, record: Record, *, is_behind: bool) -> None:
        real(view, record, is_behind=False)

    patch.setattr(CatalogView, "_want", want)
    patch.setattr(oracle, "rollout_of", _counting_loading_as_done)


def _counting_loading_as_done(record: Record, standings: list[Standing]) -> Rollout:
    from lora_serve.catalog.rollout import rollout_of

    told = [
        Standing(
            member=one.member,
            report=Report(serial=one.report.serial, failed=one.report.failed),
            silent_seconds=one.silent_seconds,
        )
        for one in standings
    ]
    return rollout_of(record, told)


def reported_before_it_is_published(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        CatalogView,
        "report",
        lambda view: Report(serial=view.serial, failed=dict(view.failed)),
    )


def the_latest_clock_wins(patch: pytest.MonkeyPatch) -> None:
    real = CatalogView._want

    def want(view: CatalogView, record: Record, *, is_behind: bool) -> None:
        known = view._wanted.get(record.name)
        if known is None or known.time <= record.time:
            real(view, record, is_behind=is_behind)

    patch.setattr(CatalogView, "_want", want)


def writers_do_not_look_who_was_first(patch: pytest.MonkeyPatch) -> None:
    real = MemoryStore.put

    def put(store: MemoryStore, record: Record, expected: int) -> Record | None:
        current = store.get(record.name)
        return real(store, record, current.serial if current else 0)

    patch.setattr(MemoryStore, "put", put)


def a_missed_change_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    real = CatalogView.take_change

    def take_change(view: CatalogView, change: Change) -> bool:
        known = Change(
            serial=change.serial,
            previous=min(view.serial, change.serial),
            record=change.record,
            joined=change.joined,
            left=change.left,
        )
        return real(view, known)

    patch.setattr(CatalogView, "take_change", take_change)


def a_replica_that_slept_does_not_ask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CatalogView, "_slept_until", lambda view, now: False)


def a_replica_that_failed_answers_as_before(patch: pytest.MonkeyPatch) -> None:
    real = CatalogView.admission

    def admission(view: CatalogView, name: str, now: float) -> Admission:
        found = real(view, name, now)
        return Admission.ADMIT if found is Admission.REFUSE else found

    patch.setattr(CatalogView, "admission", admission)
    patch.setattr(Replica, "forget", lambda replica, name: None)
    patch.setattr(
        CatalogView,
        "report",
        lambda view, real=CatalogView.report: Report(
            serial=view.serial, loading=real(view).loading
        ),
    )


def a_snapshot_is_taken_before_the_replica_is_registered(patch: pytest.MonkeyPatch) -> None:
    real = CatalogView.take_snapshot

    def take_snapshot(view: CatalogView, snapshot: Snapshot) -> bool:
        members = (*snapshot.members, view.member)
        return real(
            view, Snapshot(serial=snapshot.serial, records=snapshot.records, members=members)
        )

    patch.setattr(CatalogView, "take_snapshot", take_snapshot)


def a_report_outlives_its_process(patch: pytest.MonkeyPatch) -> None:
    real = MemoryStore.join

    def join(store: MemoryStore, member: object) -> None:
        before = dict(store._reports)
        real(store, member)  # type: ignore[arg-type]
        store._reports |= before

    patch.setattr(MemoryStore, "join", join)


def an_unloaded_name_stays_where_it_is(patch: pytest.MonkeyPatch) -> None:
    real = Replica.end_work

    def end_work(replica: Replica, work: Work) -> None:
        kept = dict(replica.engine)
        real(replica, work)
        if work.record.is_unloaded:
            replica.engine |= kept

    patch.setattr(Replica, "end_work", end_work)


def unloads_of_modules_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def is_kept(record: Record, first_generation: int) -> bool:
        return not record.is_unloaded or record.generation > first_generation

    patch.setattr(Record, "is_kept", is_kept)


def a_load_forgets_that_modules_named_it(patch: pytest.MonkeyPatch) -> None:
    def following(wish: Record, current: Record | None) -> Record:
        return replace(wish, generation=current.generation if current else 0)

    patch.setattr(plan, "_following", following)


def modules_are_loaded_by_what_was_known_before(patch: pytest.MonkeyPatch) -> None:
    def loading_module(wish: Record) -> plan.Plan:
        return lambda current: replace(plan._following(wish, current), is_module=True)

    patch.setattr(plan, "loading_module", loading_module)


MUTANTS = (
    one_replica_is_enough,
    silent_replicas_do_not_count,
    admitted_before_the_store_was_asked,
    admitted_before_it_caught_up,
    reported_before_it_is_published,
    the_latest_clock_wins,
    writers_do_not_look_who_was_first,
    a_missed_change_is_not_noticed,
    a_replica_that_slept_does_not_ask,
    a_replica_that_failed_answers_as_before,
    a_snapshot_is_taken_before_the_replica_is_registered,
    a_report_outlives_its_process,
    an_unloaded_name_stays_where_it_is,
    unloads_of_modules_are_forgotten,
    a_load_forgets_that_modules_named_it,
    modules_are_loaded_by_what_was_known_before,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_bug_that_is_put_back_is_found(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):  # of the judge, or an invariant
        live(NUM_MUTANT_LIVES)
