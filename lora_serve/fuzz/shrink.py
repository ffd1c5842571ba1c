"""Makes failing traces smaller: fewer events first, then simpler ones, then fewer flags.

Removes halves, quarters, … as delta debugging does (Zeller and Hildebrandt 2002). Knows no server:
the caller's `fails` says whether a trace fails. A failure may depend on luck, so `fails` may try a
trace that passed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from lora_serve.fuzz.trace import Ask, ConcurrentCalls, Event, Text, Tokens, Trace
from lora_serve.sampling_params import SamplingParams

Fails = Callable[[Trace], bool]

replaced = msgspec.structs.replace


def shrink(trace: Trace, fails: Fails, has_time: Callable[[], bool]) -> Trace:
    """The smallest failing trace that is found while there is time; `trace` itself fails."""
    trace = _without_events(trace, fails, has_time)
    trace = _first_that_fail(trace, _simpler_traces, fails, has_time)
    return _without_events(trace, fails, has_time)


def _without_events(trace: Trace, fails: Fails, has_time: Callable[[], bool]) -> Trace:
    size = max(1, len(trace.events) // 2)
    while True:
        start = 0
        while start < len(trace.events):
            if not has_time():
                return trace
            events = trace.events[:start] + trace.events[start + size :]
            smaller = replaced(trace, events=events)
            if smaller.num_requests and fails(smaller):
                trace = smaller
            else:
                start += size
        if size == 1:
            return trace
        size = max(1, size // 2)


def _first_that_fail(
    trace: Trace,
    candidates: Callable[[Trace], Iterator[Trace]],
    fails: Fails,
    has_time: Callable[[], bool],
) -> Trace:
    """Go on with the first simpler trace that fails, until none does."""
    found = True
    while found:
        found = False
        for simpler in candidates(trace):
            if not has_time():
                return trace
            if fails(simpler):
                trace, found = simpler, True
                break
    return trace


def _simpler_traces(trace: Trace) -> Iterator[Trace]:
    if trace.concurrency > 1:
        yield replaced(trace, concurrency=1)
    for tier in trace.tiers:
        yield replaced(trace, tiers=tuple(one for one in trace.tiers if one != tier))
    if trace.flags:
        yield replaced(trace, flags=())
    for index, event in enumerate(trace.events):
        for simpler in _simpler_events(event):
            events = (*trace.events[:index], simpler, *trace.events[index + 1 :])
            yield replaced(trace, events=events)


def _simpler_events(event: Event) -> Iterator[Event]:
    """Events with one thing less. Each is strictly simpler, so that shrinking ends."""
    if event.wait_ms:
        yield replaced(event, wait_ms=0)
    if isinstance(event, ConcurrentCalls):
        yield from _fewer_calls(event)
    if not isinstance(event, Ask):
        return
    for name, plain in (
        ("is_streamed", False),
        ("leaves_after_tokens", None),
        ("leaves_after_ms", None),
        ("api_key", 0),
        ("cache_salt", ""),
        ("talk", None),
        ("kv_transfer", ""),
        ("priority", 0),
    ):
        if getattr(event, name) != plain:
            yield replaced(event, **{name: plain})
    for params in _simpler_params(event.params):
        yield replaced(event, params=params)
    if isinstance(event.prompt, Tokens) and len(event.prompt.token_ids) > 1:
        half = len(event.prompt.token_ids) // 2
        yield replaced(event, prompt=Tokens(event.prompt.token_ids[:half]))
    if isinstance(event.prompt, Text) and len(event.prompt.text) > 1:
        yield replaced(event, prompt=Text(event.prompt.text[: len(event.prompt.text) // 2]))


def _fewer_calls(event: ConcurrentCalls) -> Iterator[Event]:
    for index in range(len(event.calls)):
        rest = event.calls[:index] + event.calls[index + 1 :]
        yield replaced(event, calls=rest) if len(rest) > 1 else rest[0]


def _simpler_params(params: SamplingParams) -> Iterator[SamplingParams]:
    plain = SamplingParams(
        n=1, max_tokens=1, temperature=0.0, seed=params.seed, logprobs=params.logprobs
    )
    if params != plain:
        yield plain
    for name in SamplingParams.__struct_fields__:
        if getattr(params, name) != getattr(plain, name):
            yield replaced(params, **{name: getattr(plain, name)})
