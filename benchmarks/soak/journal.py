"""What happened: outcomes by kind, latencies, events with their times, and every incident in full.

Decides whether an outcome was to be expected: errors are, while the engine is down, the queue is
full, or the adapter is being changed, and then only.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.soak.asking import versions_of
from benchmarks.soak.cold_answers import ColdAnswers
from benchmarks.soak.questions import BASE, Question
from benchmarks.soak.tenants import Span, Tenant
from lora_serve.fuzz.answers import Heard

MAX_INCIDENTS = 50
ANSWERED, LEFT, WRONG, UNEXPECTED = "answered", "left by the client", "wrong", "unexpected"
QUEUE_FULL, DOWN = "refused: queue full", "engine down"
UNREADABLE, ABSENT = "adapter's files changed", "adapter unloaded"
NOT_FORGOTTEN = "reset not confirmed: Redis away"
GIVEN_UP, BAD_BODY = "given up: slow reader", "refused: bad body"
RACED = "races of admins"


@dataclass(frozen=True, slots=True)
class Event:
    """seconds: since the soak's begin."""

    what: str
    seconds: float


@dataclass(slots=True)
class Journal:
    """began_at: on the monotonic clock. outages: from a kill until there is a new engine.

    redis_troubles: while Redis was away, or the server may not have noticed yet that it is back.
    """

    answers: ColdAnswers
    began_at: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)  # of answers since `take_latencies`
    num_tokens: int = 0
    num_cached_tokens: int = 0
    events: list[Event] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)
    outages: list[Span] = field(default_factory=list)
    redis_troubles: list[Span] = field(default_factory=list)

    def note_event(self, what: str) -> None:
        self.events.append(Event(what, round(time.monotonic() - self.began_at, 1)))

    def note_answer(self, question: Question, tenant: Tenant | None, heard: Heard) -> None:
        kind, story = self._judge(question, tenant, heard)
        self.note(kind, f"question {question.index} of {tenant.name if tenant else BASE}: {story}")
        if kind == ANSWERED:
            self.latencies.append(heard.end - heard.begin)
            self.num_tokens += heard.num_tokens
            self.num_cached_tokens += heard.num_cached_tokens

    def note(self, kind: str, story: str = "") -> None:
        self.counts[kind] += 1
        if kind in (WRONG, UNEXPECTED) and len(self.incidents) < MAX_INCIDENTS:
            seconds = time.monotonic() - self.began_at
            self.incidents.append(f"{seconds:.1f} s, {kind}: {story}")

    def note_call_faults(self, what: str, begin: float, faults: list[str]) -> None:
        """Calls that did not succeed at once: only an engine that is down excuses them."""
        for fault in faults:
            self.note(DOWN if self.was_down(begin, time.monotonic()) else UNEXPECTED,
                      f"{what}: {fault}")  # fmt: skip

    def was_down(self, begin: float, end: float) -> bool:
        return any(outage.meets(begin, end) for outage in self.outages)

    def had_redis_trouble(self, begin: float, end: float) -> bool:
        return any(trouble.meets(begin, end) for trouble in self.redis_troubles)

    def take_latencies(self) -> list[float]:
        taken, self.latencies = self.latencies, []
        return taken

    def _judge(self, question: Question, tenant: Tenant | None, heard: Heard) -> tuple[str, str]:
        """What came of a question, and what the report says of it.

        Also the start of an answer that an error ended must be right.
        """
        fault = _fault_of_version(tenant, heard)
        fault = fault or self.answers.fault_of(
            question, heard, is_part=heard.has_left or heard.status != 200
        )
        if fault is not None:
            return WRONG, fault
        if heard.has_left:
            return LEFT, ""
        if heard.status == 200:
            return ANSWERED, ""
        return self._excuse(tenant, heard) or UNEXPECTED, f"{heard.status} {heard.message}"

    def _excuse(self, tenant: Tenant | None, heard: Heard) -> str | None:
        status, when = heard.status, (heard.begin, heard.end)
        if is_full(status, heard.message):
            return QUEUE_FULL
        if status == 503 and self.was_down(*when):
            return DOWN
        if tenant and status == 404 and tenant.may_be_absent(*when):
            return ABSENT
        if tenant and status == 400 and tenant.may_be_unreadable(*when):
            return UNREADABLE
        return None


def is_full(status: int, text: str) -> bool:
    """Whether a refusal names the bound of the queue."""
    return status == 503 and "--max-num-queued-reqs" in text


def _fault_of_version(tenant: Tenant | None, heard: Heard) -> str | None:
    """What is wrong if a version answered that was not loaded then."""
    for choice in heard.choices.values():
        for version in versions_of(choice):
            if tenant is None and version:
                return f"the base model answered as {version}"
            if tenant and not tenant.may_answer(version, heard.begin, heard.end):
                return f"version {version or BASE} was not there to answer"
    return None
