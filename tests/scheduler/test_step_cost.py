"""What a step asks of each request that asks for nothing special, counted in calls of functions.

Calls are the same on every machine, and they are what made steps slower whenever a capability
looked at every request of every step.
"""

from __future__ import annotations

import pytest

from benchmarks.speed.scheduling import Load, Times
from lora_serve.scheduler.request import Request
from tests.fakes.python_calls import python_calls

NUM_RUNNING = 32
NUM_STEPS = 40
LIMIT = 26  # 24 are called; a question to each request and one to each of its chunks are two more


def calls_of_a_request(monkeypatch: pytest.MonkeyPatch, *, is_overlapped: bool) -> float:
    """Calls of Python functions for each request of each step, admissions and ends among them."""
    load = Load(NUM_RUNNING, NUM_RUNNING, 0, "none", is_overlapped)
    load.fill()
    monkeypatch.setattr(load, "fill", lambda: None)  # requests that arrive are no part of a step
    num_requests = 0
    with python_calls() as calls:
        for _ in range(NUM_STEPS):
            load.step(Times([], []))
            num_requests += load.scheduler.num_running
    return calls.num / num_requests


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["one by one", "overlapped"])
def test_what_a_usual_request_does_not_use_costs_its_steps_no_calls(
    is_overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calls_of_a_request(monkeypatch, is_overlapped=is_overlapped) < LIMIT


def test_a_rule_that_is_asked_of_every_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_each_time = property(Request._is_plain, lambda request, is_plain: None)
    monkeypatch.setattr(Request, "is_plain", asked_each_time)
    assert calls_of_a_request(monkeypatch, is_overlapped=False) >= LIMIT
