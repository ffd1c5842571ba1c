from __future__ import annotations

import pytest

from lora_serve.kv_tiers.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(threshold=3, first_seconds=1.0, longest_seconds=4.0, clock=clock)


def trip(breaker: Breaker) -> None:
    while breaker.state == "closed":
        breaker.failure()


def test_it_opens_after_failures_in_a_row(breaker: Breaker) -> None:
    assert [breaker.failure() for _ in range(2)] == [False, False]
    breaker.success()
    assert [breaker.failure() for _ in range(3)] == [False, False, True]
    assert breaker.state == "open"
    assert not breaker.allow()
    assert breaker.num_trips == 1


def test_after_the_back_off_one_call_may_try(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += 1.0
    assert breaker.state == "half-open"
    assert breaker.would_allow()
    assert [breaker.allow(), breaker.allow(), breaker.would_allow()] == [True, False, False]
    breaker.success()
    assert breaker.state == "closed"
    assert breaker.allow()


def test_the_back_off_doubles_up_to_its_limit(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    for backoff in (1.0, 2.0, 4.0, 4.0):
        clock.now += 0.99 * backoff
        assert not breaker.allow()
        clock.now += 0.01 * backoff
        assert breaker.allow()
        breaker.failure()
    assert breaker.num_trips == 1  # it never closed in between


def test_a_success_resets_the_back_off(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += 1.0
    assert breaker.allow()
    breaker.failure()
    clock.now += 2.0
    assert breaker.allow()
    breaker.success()
    trip(breaker)
    clock.now += 1.0
    assert breaker.allow()


def test_calls_from_before_it_opened_do_not_prolong_the_back_off(
    breaker: Breaker, clock: Clock
) -> None:
    trip(breaker)
    for _ in range(10):
        breaker.failure()
    clock.now += 1.0
    assert breaker.allow()
