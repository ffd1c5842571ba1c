from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from random import Random

import msgspec
import pytest

from lora_serve.bench.workload import TimedRequest, WorkloadSpec, draw_requests, make_workload
from lora_serve.errors import ConfigError
from lora_serve.fleet.routing import POLICIES
from lora_serve.simulate.costs import Costs, EngineSettings
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.records import Simulated, SimulatedRequest
from tests.fakes.python_calls import python_calls
from tests.simulate.costs import BUSY, COSTS, ENGINE


def simulated(
    spec: WorkloadSpec,
    num_replicas: int = 2,
    policy: str = "least-loaded",
    settings: EngineSettings = ENGINE,
    max_concurrency: int | None = None,
    costs: Costs = COSTS,
    seed: int = 0,
) -> Simulated:
    fleet = Fleet(settings, costs, num_replicas, policy, max_concurrency, seed=seed)
    return fleet.run(draw_requests(spec))


def random_spec(seed: int) -> WorkloadSpec:
    random = Random(seed)
    return WorkloadSpec(
        seed=seed,
        num_requests=random.randint(1, 50),
        input_tokens=random.randint(1, 120),
        output_tokens=random.randint(1, 40),
        length_spread=random.choice((0.0, 0.9)),
        shared_prefix_tokens=random.choice((0, 16, 100)),
        num_prefixes=random.randint(1, 4),
        adapters=tuple(f"a{i}" for i in range(random.choice((0, 1, 9)))),
        popularity=random.choice(("uniform", "zipf", "round-robin")),
        request_rate=random.choice((None, 2.0, 30.0, 1000.0)),
    )


@pytest.mark.parametrize("seed", range(10))
def test_every_request_ends_and_every_token_was_computed_or_cached(seed: int) -> None:
    spec, random = random_spec(seed), Random(seed)
    settings = msgspec.structs.replace(
        ENGINE, num_blocks=random.choice((24, 64, 400)), is_asynchronous=seed % 3 == 0
    )
    num_replicas, policy = random.randint(1, 5), random.choice(list(POLICIES))
    concurrency, costs = random.choice((None, 3)), random.choice((COSTS, BUSY))
    result = simulated(spec, num_replicas, policy, settings, concurrency, costs)
    requests = make_workload(spec)
    assert len(result.records) == len(requests)
    asked = 0
    for record, request in zip(result.records, requests, strict=True):
        assert record.error is None
        assert record.is_done
        assert record.output_tokens == request.max_tokens
        assert request.at_seconds <= record.sent < record.first_token <= record.last_token
        assert record.last_token <= result.wall_seconds
        asked += record.prompt_tokens + record.output_tokens - 1  # the last one is not computed
    clients = [result.records] if costs is COSTS else by_replica(result)
    assert all(a.sent <= b.sent for one in clients for a, b in pairwise(one))
    cached = sum(record.cached_tokens for record in result.records)
    computed = result.totals.num_computed_tokens
    if result.totals.num_preemptions == 0 and not settings.is_asynchronous:
        assert computed + cached == asked
    else:  # what was preempted is computed again; a step in flight may compute behind an end
        assert computed + cached >= asked
    assert sum(result.totals.busy_seconds) <= len(result.totals.busy_seconds) * result.wall_seconds


def by_replica(result: Simulated) -> list[list[SimulatedRequest]]:
    """Each replica's records: a client that is busy sends later than another one."""
    found: dict[int, list[SimulatedRequest]] = defaultdict(list)
    for record in result.records:
        found[record.replica].append(record)
    return list(found.values())


@pytest.mark.parametrize("costs", [COSTS, BUSY], ids=("steady", "busy"))
def test_one_seed_gives_one_simulation_and_another_seed_another(costs: Costs) -> None:
    one, again, other = (times(simulated(random_spec(spec), costs=costs)) for spec in (3, 3, 4))
    assert one == again
    assert one != other


def test_the_seed_of_steps_changes_those_that_deviate_alone() -> None:
    first, second = (times(simulated(random_spec(3), costs=BUSY, seed=seed)) for seed in (0, 1))
    assert first != second
    first, second = (times(simulated(random_spec(3), seed=seed)) for seed in (0, 1))
    assert first == second


def test_steps_that_deviate_take_as_long_together_as_their_ratios_say() -> None:
    spec = WorkloadSpec(num_requests=40, output_tokens=60, input_tokens=1, request_rate=None)
    ratios = {"decode": (0.5, 1.0, 3.0)}
    deviating = msgspec.structs.replace(COSTS, ratios=ratios)
    steady, slow = (
        simulated(spec, 1, max_concurrency=8, costs=costs).totals.busy_seconds[0]
        for costs in (COSTS, deviating)
    )
    assert slow == pytest.approx(1.5 * steady, rel=0.1)


def times(result: Simulated) -> list[tuple[float, float, int]]:
    return [(one.first_token, one.last_token, one.replica) for one in result.records]


def test_a_lone_request_takes_its_way_and_its_steps() -> None:
    """20 + 3 tokens: one step of 20, then two of one."""
    fleet = Fleet(ENGINE, COSTS, 1)
    (record,) = fleet.run([TimedRequest(tuple(range(20)), 3, at_seconds=1.0)]).records
    first = 1.0 + 0.003 + 0.01 + 20 * 0.0005
    assert (record.sent, record.cached_tokens) == (1.0, 0)
    assert record.first_token == pytest.approx(first)
    assert record.last_token == pytest.approx(first + 2 * (0.01 + 0.001))


def test_an_adapter_is_read_before_its_first_request_and_not_before_the_next() -> None:
    """Costs of a replica's first request: 0.2 s of reading and 0.05 s of preparing."""
    fleet = Fleet(ENGINE, COSTS, 1)
    prompt = tuple(range(20))
    cold, warm = fleet.run(
        [TimedRequest(prompt, 1, "a"), TimedRequest(prompt[::-1], 1, "a", at_seconds=5.0)]
    ).records
    assert cold.ttft_seconds == pytest.approx(0.003 + 0.25 + 0.01 + 20 * 0.0005 + 0.002)
    assert warm.ttft_seconds == pytest.approx(0.003 + 0.01 + 20 * 0.0005 + 0.002)


def test_a_closed_loop_keeps_so_many_requests_running_and_no_more() -> None:
    result = simulated(WorkloadSpec(num_requests=20, output_tokens=5), max_concurrency=3)
    for record in result.records:
        others = [r for r in result.records if r.sent <= record.sent < r.last_token]
        assert len(others) <= 3
    assert result.records[3].sent == min(record.last_token for record in result.records)


def test_more_replicas_than_one_shorten_the_wait() -> None:
    spec = WorkloadSpec(num_requests=40, request_rate=50.0, output_tokens=20)
    one, four = (simulated(spec, number) for number in (1, 4))
    assert four.wall_seconds < one.wall_seconds / 2
    assert {record.replica for record in four.records} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [(500, 100, "--max-model-len 512"), (200, 200, "--num-gpu-blocks-override 20")],
)
def test_a_request_that_no_server_takes_is_named(prompt: int, max_tokens: int, words: str) -> None:
    settings = msgspec.structs.replace(ENGINE, num_blocks=20)
    fleet = Fleet(settings, COSTS, 1)
    with pytest.raises(ConfigError, match=words):
        fleet.run([TimedRequest((1,), 1), TimedRequest((1,) * prompt, max_tokens)])


@pytest.mark.parametrize("costs", [COSTS, BUSY], ids=("steady", "busy"))
def test_work_grows_with_the_number_of_requests_and_not_faster(costs: Costs) -> None:
    """Calls of Python functions are counted: they do not depend on the machine."""
    counts = [num_calls(number, costs) for number in (60, 120, 240)]
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.15)
    assert counts[2] / counts[1] == pytest.approx(2, rel=0.15)


def num_calls(num_requests: int, costs: Costs) -> int:
    spec = WorkloadSpec(
        num_requests=num_requests,
        input_tokens=30,
        output_tokens=8,
        shared_prefix_tokens=32,
        adapters=tuple(f"a{i}" for i in range(num_requests // 2)),
        popularity="zipf",
        request_rate=200.0,
    )
    fleet = Fleet(ENGINE, costs, 8)
    with python_calls() as calls:
        fleet.run(draw_requests(spec))
    return calls.num
