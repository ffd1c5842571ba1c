from __future__ import annotations

from lora_serve.messages import EngineOutput
from lora_serve.observability.intervals import TokenIntervals


def token(request_id: str, finish_reason: str | None = None) -> EngineOutput:
    return EngineOutput(request_id, new_token_ids=(1,), finish_reason=finish_reason)


def test_a_first_token_has_no_interval() -> None:
    assert list(TokenIntervals().observe([token("a")], 1.0)) == []


def test_a_finished_request_id_can_be_used_again() -> None:
    intervals = TokenIntervals()
    list(intervals.observe([token("a", "stop")], 1.0))
    assert list(intervals.observe([token("a")], 9.0)) == []


def test_requests_that_fell_silent_are_forgotten_first() -> None:
    intervals = TokenIntervals(max_requests=2)
    list(intervals.observe([token("aborted")], 1.0))
    list(intervals.observe([token("b")], 2.0))
    list(intervals.observe([token("c")], 3.0))
    assert list(intervals.observe([token("aborted")], 4.0)) == []
    assert list(intervals.observe([token("c")], 5.0)) == [2.0]
