from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from lora_serve.bench.workload import FIRST_TOKEN_ID, WorkloadSpec, make_workload
from lora_serve.demo.recipe import Recipe
from lora_serve.errors import ConfigError

ADAPTERS = tuple(f"a{i}" for i in range(50))


def adapters_asked(spec: WorkloadSpec) -> Counter[str | None]:
    return Counter(request.adapter for request in make_workload(spec))


def test_one_seed_gives_one_workload_and_another_seed_another() -> None:
    spec = WorkloadSpec(seed=3, adapters=ADAPTERS, request_rate=5.0, length_spread=0.5)
    assert make_workload(spec) == make_workload(spec)
    other = WorkloadSpec(seed=4, adapters=ADAPTERS, request_rate=5.0, length_spread=0.5)
    assert make_workload(spec) != make_workload(other)


def test_a_workload_is_the_same_on_every_machine_and_python() -> None:
    spec = WorkloadSpec(
        seed=1,
        num_requests=2,
        input_tokens=3,
        adapters=("x", "y"),
        request_rate=1.0,
        vocab_size=1000,
    )
    first, second = make_workload(spec)
    assert (first.prompt_token_ids, first.adapter) == ((855, 956, 828), "y")
    assert (second.prompt_token_ids, second.adapter) == ((482, 977, 811), "y")
    assert second.at_seconds == pytest.approx(1.2111, abs=1e-4)


def test_more_adapters_leave_prompts_and_times_as_they_were() -> None:
    few = make_workload(WorkloadSpec(adapters=ADAPTERS[:2], request_rate=2.0))
    many = make_workload(WorkloadSpec(adapters=ADAPTERS, request_rate=2.0))
    assert [r.prompt_token_ids for r in few] == [r.prompt_token_ids for r in many]
    assert [r.at_seconds for r in few] == [r.at_seconds for r in many]


def test_zipf_asks_for_the_kth_adapter_in_proportion_to_a_power_of_k() -> None:
    spec = WorkloadSpec(
        num_requests=40_000, input_tokens=1, adapters=ADAPTERS, popularity="zipf", zipf_exponent=1.2
    )
    asked = adapters_asked(spec)
    total = sum(k**-1.2 for k in range(1, 51))
    for k in (1, 2, 5, 20, 50):
        expected = 40_000 * k**-1.2 / total
        assert asked[f"a{k - 1}"] == pytest.approx(expected, abs=5 * expected**0.5)


def test_uniform_asks_for_all_adapters_alike() -> None:
    asked = adapters_asked(WorkloadSpec(num_requests=20_000, input_tokens=1, adapters=ADAPTERS))
    assert set(asked) == set(ADAPTERS)
    assert all(abs(count - 400) < 5 * 400**0.5 for count in asked.values())


def test_round_robin_asks_for_adapters_in_turn() -> None:
    spec = WorkloadSpec(num_requests=5, adapters=("x", "y"), popularity="round-robin")
    assert [r.adapter for r in make_workload(spec)] == ["x", "y", "x", "y", "x"]


def test_without_adapters_the_base_is_asked() -> None:
    assert adapters_asked(WorkloadSpec(num_requests=3)) == {None: 3}


def test_prompts_share_as_many_prefixes_as_were_asked_for_and_nothing_else() -> None:
    spec = WorkloadSpec(
        num_requests=60, shared_prefix_tokens=32, num_prefixes=3, input_tokens=16, vocab_size=500
    )
    prompts = [request.prompt_token_ids for request in make_workload(spec)]
    assert len({prompt[:32] for prompt in prompts}) == 3
    assert len({prompt[32:] for prompt in prompts}) == 60
    assert all(len(prompt) == 48 for prompt in prompts)
    assert all(FIRST_TOKEN_ID <= token < 500 for prompt in prompts for token in prompt)


def test_prompts_have_tokens_of_every_vocabulary_unless_more_are_asked_for() -> None:
    """Which each server is asked with: it does not tell how many it knows."""
    spec = WorkloadSpec(num_requests=20, shared_prefix_tokens=50)
    drawn = {token for request in make_workload(spec) for token in request.prompt_token_ids}
    assert max(drawn) < 256 <= Recipe().vocab_size
    assert min(drawn) >= FIRST_TOKEN_ID


def test_workloads_of_one_prefix_seed_share_prefixes_and_nothing_else() -> None:
    cold = make_workload(WorkloadSpec(seed=1, shared_prefix_tokens=32, input_tokens=16))
    hot = make_workload(
        WorkloadSpec(seed=2, prefix_seed=1, shared_prefix_tokens=32, input_tokens=16)
    )
    for one, other in zip(cold, hot, strict=True):
        assert one.prompt_token_ids[:32] == other.prompt_token_ids[:32]
        assert one.prompt_token_ids[32:] != other.prompt_token_ids[32:]


def test_a_length_spread_draws_lengths_around_what_was_asked() -> None:
    spec = WorkloadSpec(num_requests=400, input_tokens=100, output_tokens=10, length_spread=0.5)
    requests = make_workload(spec)
    inputs = [len(request.prompt_token_ids) for request in requests]
    outputs = [request.max_tokens for request in requests]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (5, 15)


def test_poisson_arrivals_come_at_the_rate_and_with_its_variance() -> None:
    spec = WorkloadSpec(num_requests=20_001, input_tokens=1, request_rate=4.0)
    times = [request.at_seconds for request in make_workload(spec)]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_requests": 0},
        {"input_tokens": 0},
        {"output_tokens": 0},
        {"shared_prefix_tokens": -1},
        {"num_prefixes": 0},
        {"vocab_size": 10},
        {"length_spread": 1.0},
        {"zipf_exponent": 0.0},
        {"zipf_exponent": float("nan")},
        {"request_rate": 0.0},
        {"request_rate": float("nan")},
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_name(fields: dict[str, float]) -> None:
    (name,) = fields
    with pytest.raises(ConfigError, match=name):
        WorkloadSpec(**fields)  # type: ignore[arg-type]
