from __future__ import annotations

from math import log2

import pytest

from lora_serve.bench.goodput import Limits
from lora_serve.bench.workload import TimedRequest
from lora_serve.errors import ConfigError
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.report import Choice, Row
from lora_serve.simulate.sizing import least_replicas, smallest
from tests.simulate.costs import COSTS


@pytest.mark.parametrize("least_enough", [1, 2, 3, 7, 8, 9, 100, 999, 1000])
def test_the_smallest_number_is_found_by_few_questions(least_enough: int) -> None:
    asked: list[int] = []

    def is_enough(number: int) -> bool:
        asked.append(number)
        return number >= least_enough

    assert smallest(is_enough, most=1000) == least_enough
    assert len(asked) == len(set(asked)) <= 2 * log2(least_enough) + 2
    assert max(asked) <= 1000


def test_none_is_enough() -> None:
    with pytest.raises(ConfigError, match="5 replicas are not enough"):
        smallest(lambda number: False, most=5)


BURST = [TimedRequest((*range(9),), 60, at_seconds=0.02 * number) for number in range(120)]


@pytest.mark.parametrize(
    "limits", [Limits(e2el=1000), Limits(ttft=200, tpot=20), Limits(ttft=50, tpot=30)]
)
@pytest.mark.parametrize("attainment", [0.5, 0.99])
def test_no_number_that_is_enough_is_left_out(limits: Limits, attainment: float) -> None:
    """One fewer than the least misses the limits."""
    engine = COSTS.engine
    least = least_replicas(BURST, COSTS.seconds_of, engine, limits, attainment)
    assert least > 1
    fleet = Fleet(engine, COSTS, least - 1, "least-loaded")
    row = Row.of(Choice(least - 1, "least-loaded", 1), fleet.run(BURST), limits)
    assert row.goodput.share < attainment


@pytest.mark.parametrize("limits", [Limits(ttft=100), Limits(tpot=10), Limits()])
def test_without_a_limit_on_whole_answers_one_replica_is_tried(limits: Limits) -> None:
    assert least_replicas(BURST, COSTS.seconds_of, COSTS.engine, limits, 0.99) == 1


def test_only_the_cheapest_of_those_to_be_kept_count() -> None:
    """Nine of ten requests draw one token each, which costs nothing behind it."""
    requests = [TimedRequest((1,), 100 if number == 0 else 1) for number in range(10)]
    limits = Limits(e2el=1)

    def least(attainment: float) -> int:
        return least_replicas(requests, COSTS.seconds_of, COSTS.engine, limits, attainment)

    assert (least(0.9), least(0.91) > 1) == (1, True)
