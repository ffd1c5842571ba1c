from __future__ import annotations

import msgspec
import pytest

from lora_serve.bench.workload import TimedRequest, WorkloadSpec, draw_requests
from lora_serve.errors import ConfigError
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.rollout import WATCH_SECONDS, RollOut
from tests.simulate.costs import COSTS, ENGINE

SPEC = WorkloadSpec(
    num_requests=120,
    input_tokens=20,
    output_tokens=6,
    shared_prefix_tokens=32,
    adapters=("a", "b", "c", "d"),
    request_rate=40.0,
)


def test_after_a_roll_out_is_everywhere_no_replica_answers_with_the_version_before() -> None:
    roll_outs = [RollOut("a", 0.8), RollOut("b", 0.9), RollOut("a", 2.0)]
    fleet = Fleet(ENGINE, COSTS, 3, "affinity", roll_outs=roll_outs)
    result = fleet.run(draw_requests(SPEC))
    done = {(one.name, one.at_seconds): one.seconds for one in result.rolled_out}
    assert set(done) == {(one.name, one.at_seconds) for one in roll_outs}
    assert all(WATCH_SECONDS + 0.25 <= seconds < 2.0 for seconds in done.values())
    seen = set()
    for record in result.records:
        arrived = record.sent + COSTS.request_seconds
        changes = [(at, at + done[name, at]) for name, at in done if name == record.adapter]
        everywhere = sum(end <= arrived for _, end in changes)
        begun = sum(begin <= record.first_token for begin, _ in changes)
        assert everywhere <= record.version <= begun
        seen.add((record.adapter, record.version))
    assert seen == {("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0), ("d", 0)}


def test_a_replaced_adapter_finds_none_of_the_kv_of_the_version_before() -> None:
    prompt = tuple(range(10, 58))
    fleet = Fleet(ENGINE, COSTS, 1, roll_outs=[RollOut("a", 5.0)])
    requests = [TimedRequest(prompt, 2, "a", at) for at in (0.0, 4.0, 8.0, 9.0)]
    records = fleet.run(requests).records
    assert [record.version for record in records] == [0, 0, 1, 1]
    assert [record.cached_tokens for record in records] == [0, 32, 0, 32]


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
