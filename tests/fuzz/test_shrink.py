from __future__ import annotations

from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.shrink import shrink
from lora_serve.fuzz.trace import Ask, ConcurrentCalls, Load, Reset, Trace, Unload

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


def test_concurrent_calls_shrink_to_those_that_it_takes() -> None:
    calls = (Load(lora_name="red", version=1), Reset(), Unload(lora_name="red"))
    ask = next(event for event in make_trace(5, SCOPE).events if isinstance(event, Ask))
    trace = Trace(seed=0, events=(ConcurrentCalls(calls=calls, wait_ms=5), ask))

    def loads_and_unloads_at_once(trace: Trace) -> bool:
        together = [e.calls for e in trace.events if isinstance(e, ConcurrentCalls)]
        return any({Load, Unload} <= {type(call) for call in calls} for calls in together)

    small = shrink(trace, loads_and_unloads_at_once, lambda: True)
    assert small.events[0] == ConcurrentCalls(calls=(calls[0], calls[2]))
    smaller = shrink(trace, lambda trace: any(trace.loads), lambda: True)
    assert smaller.events[0] == calls[0], "one call is no group"
