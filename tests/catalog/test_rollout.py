from __future__ import annotations

from lora_serve.catalog.records import Failure, Member, Record, Report, Standing
from lora_serve.catalog.rollout import State, rollout_of

RECORD = Record(name="a", serial=7, digest="aa", source="/a")


def standing(name: str, silent: float = 0.0, **report: object) -> Standing:
    member = Member(replica_id=name, address=f"http://{name}", incarnation="1")
    return Standing(member=member, report=Report(**report), silent_seconds=silent)


def states(*standings: Standing) -> list[State]:
    return [one.state for one in rollout_of(RECORD, standings).replicas]


def test_a_change_is_everywhere_once_every_replica_has_reported_it_done() -> None:
    done = [standing("one", serial=7), standing("two", serial=9, loading={"b": 9})]
    rollout = rollout_of(RECORD, done)
    assert (rollout.is_everywhere, rollout.is_settled) == (True, True)
    assert str(rollout) == "everywhere: 2 of 2 replicas have it"
    late = rollout_of(RECORD, [*done, standing("three", serial=6)])
    assert (late.is_everywhere, late.is_settled) == (False, False)


def test_each_replica_that_has_it_not_is_named_with_the_reason() -> None:
    rollout = rollout_of(
        RECORD,
        [
            standing("one", serial=7),
            standing("two", serial=7, failed={"a": Failure(7, "no such file")}),
            standing("three", serial=7, loading={"a": 7}),
            standing("four", silent=61.3, serial=3),
            standing("five", serial=3),
        ],
    )
    assert [one.state for one in rollout.replicas] == [
        State.READY,
        State.FAILED,
        State.LOADING,
        State.SILENT,
        State.BEHIND,
    ]
    assert str(rollout) == (
        "on 1 of 5 replicas; not on two (failed: no such file), three (loading), "
        "four (not heard from: for 61 s), five (behind)"
    )


def test_a_silent_replica_is_waited_for_no_longer_but_what_it_has_done_stays_done() -> None:
    assert states(standing("dead", silent=60, serial=7)) == [State.READY]
    assert states(standing("dead", silent=60, serial=7, loading={"a": 7})) == [State.SILENT]
    assert states(standing("dead", silent=9, serial=6)) == [State.BEHIND]


def test_a_replica_that_works_on_a_later_change_may_still_have_the_one_before_both() -> None:
    assert states(standing("one", serial=9, loading={"a": 9})) == [State.LOADING]
