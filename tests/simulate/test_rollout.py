from __future__ import annotations

import msgspec
import pytest

from lora_serve.bench.workload import TimedRequest, WorkloadSpec, draw_requests
from lora_serve.errors import ConfigError
from lora_serve.simulate import rollout
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.records import Simulated, SimulatedRequest
from lora_serve.simulate.rollout import WATCH_SECONDS, RolledOut, RollOut
from tests.simulate.costs import COSTS, ENGINE

SPEC = WorkloadSpec(
    num_requests=120,
    input_tokens=20,
    output_tokens=6,
    shared_prefix_tokens=32,
    adapters=("a", "b", "c", "d"),
    request_rate=40.0,
)


ROLL_OUTS = [RollOut("a", 0.8), RollOut("b", 0.9), RollOut("a", 2.0)]


def rolled_out() -> Simulated:
    fleet = Fleet(ENGINE, COSTS, 3, "affinity", roll_outs=ROLL_OUTS)
    return fleet.run(draw_requests(SPEC))


def impossible(result: Simulated) -> list[SimulatedRequest]:
    """Requests that a version answered which was not there yet, or that was gone everywhere."""
    found = []
    for record in result.records:
        changes = [one for one in result.rolled_out if one.name == record.adapter]
        arrived = record.sent + COSTS.request_seconds
        everywhere = sum(one.at_seconds + one.seconds <= arrived for one in changes)
        begun = sum(one.at_seconds <= record.first_token for one in changes)
        if not everywhere <= record.version <= begun:
            found.append(record)
    return found


def test_after_a_roll_out_is_everywhere_no_replica_answers_with_the_version_before() -> None:
    result = rolled_out()
    ended = sorted((one.name, one.at_seconds) for one in result.rolled_out)
    assert ended == sorted((one.name, one.at_seconds) for one in ROLL_OUTS)
    assert all(WATCH_SECONDS + 0.25 <= one.seconds < 2.0 for one in result.rolled_out)
    assert impossible(result) == []
    seen = {(record.adapter, record.version) for record in result.records}
    assert seen == {("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0), ("d", 0)}


def test_a_roll_out_that_is_told_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: replicas have heard of the change, and that is taken for having it."""

    def told_when_heard(name: str, at_seconds: float, seconds: float) -> RolledOut:
        return RolledOut(name, at_seconds, WATCH_SECONDS)

    monkeypatch.setattr(rollout, "RolledOut", told_when_heard)
    assert impossible(rolled_out())


def test_a_replaced_adapter_finds_none_of_the_kv_of_the_version_before() -> None:
    prompt = tuple(range(10, 58))
    fleet = Fleet(ENGINE, COSTS, 1, roll_outs=[RollOut("a", 5.0)])
    requests = [TimedRequest(prompt, 2, "a", at) for at in (0.0, 4.0, 8.0, 9.0)]
    records = fleet.run(requests).records
    assert [record.version for record in records] == [0, 0, 1, 1]
    assert [record.cached_tokens for record in records] == [0, 32, 0, 32]


def test_a_name_may_be_asked_for_first_while_its_new_version_is_being_published() -> None:
    """Requests come all the time around the moment at which the replica has read it."""
    fleet = Fleet(ENGINE, COSTS, 1, roll_outs=[RollOut("a", 1.0)])
    around = [TimedRequest((1,) * 60, 4, "b", 1.0 + 0.01 * number) for number in range(40)]
    first = TimedRequest((1, 2, 3), 1, "a", 1.0 + WATCH_SECONDS + 0.33)
    requests = sorted([*around, first], key=lambda request: request.at_seconds)
    records = fleet.run(requests).records
    assert [record.version for record in records if record.adapter == "a"] in ([0], [1])


def test_a_roll_out_to_replicas_that_were_never_asked_for_the_name_takes_its_time_too() -> None:
    fleet = Fleet(ENGINE, COSTS, 5, roll_outs=[RollOut("unasked", 1.0)])
    result = fleet.run([TimedRequest((1, 2), 2)])
    (one,) = result.rolled_out
    assert one.seconds == pytest.approx(WATCH_SECONDS + 0.25, abs=0.05)
    assert result.totals.adapter_loads == 5


def test_the_old_version_answers_until_the_new_one_is_there() -> None:
    slow = msgspec.structs.replace(COSTS, adapter_read_seconds=3.0)
    fleet = Fleet(ENGINE, slow, 1, roll_outs=[RollOut("a", 5.0)])
    requests = [TimedRequest((1, 2, 3), 1, "a", at) for at in (0.0, 7.0, 9.0)]
    assert [record.version for record in fleet.run(requests).records] == [0, 0, 1]


@pytest.mark.parametrize("text", ["a", "a@", "@3", "a@-1", "a@inf", "a@soon"])
def test_what_is_no_roll_out_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="such as adapter-0@30"):
        RollOut.parse(text)
