from __future__ import annotations

import pytest

from benchmarks.simulate.validate import at_pace
from lora_serve.bench.workload import WorkloadSpec, make_workload
from lora_serve.simulate.costs import Costs
from lora_serve.simulate.fleet import Fleet
from tests.simulate.costs import BUSY

REQUESTS = make_workload(
    WorkloadSpec(
        num_requests=30, input_tokens=20, output_tokens=9, length_spread=0.5, adapters=("a", "b")
    )
)


def times(costs: Costs) -> list[float]:
    result = Fleet(costs.engine, costs, 1, max_concurrency=4).run(REQUESTS)
    return [time for one in result.records for time in (one.sent, one.first_token, one.last_token)]


def test_a_machine_at_half_the_pace_does_the_same_in_twice_the_time() -> None:
    assert times(at_pace(BUSY, 2.0)) == pytest.approx([2 * time for time in times(BUSY)])
