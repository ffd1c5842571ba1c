from __future__ import annotations

from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.shrink import shrink
from lora_serve.fuzz.trace import Ask, Trace

SCOPE = Scope(vocab_size=300, num_versions=6, num_requests=60)


def asks(trace: Trace) -> list[Ask]:
    return [event for event in trace.events if isinstance(event, Ask)]


def has_two_that_meet(trace: Trace) -> bool:
    """Stands for a fault that takes a salted streamed request and one of two choices."""
    salted = any(ask.cache_salt and ask.is_streamed for ask in asks(trace))
    return salted and any(ask.params.n == 2 for ask in asks(trace))


def test_a_trace_shrinks_to_the_events_that_it_takes_at_their_simplest() -> None:
    trace = make_trace(5, SCOPE)
    assert has_two_that_meet(trace)
    small = shrink(trace, has_two_that_meet, lambda: True)
    assert has_two_that_meet(small)
    assert len(small.events) <= 2
    assert all(ask.wait_ms == ask.priority == 0 for ask in asks(small))
    assert all(ask.params.max_tokens == 1 for ask in asks(small))
    assert (small.flags, small.concurrency) == ((), 1)


def test_without_time_a_trace_stays_as_it_is() -> None:
    trace = make_trace(5, SCOPE)
    assert shrink(trace, has_two_that_meet, lambda: False) is trace
