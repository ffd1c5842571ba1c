"""What a run of the fuzzer has counted, for its table and its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from lora_serve.fuzz.answers import Called, CalledAtOnce, Heard
from lora_serve.fuzz.judge import Finding
from lora_serve.fuzz.player import RESTARTS, Record
from lora_serve.fuzz.runners import TraceRun
from lora_serve.fuzz.trace import (
    Abort,
    Ask,
    Chat,
    ConcurrentCalls,
    Damage,
    Embeds,
    Event,
    Kill,
    Load,
    PauseAndResume,
    Reset,
    Text,
    Trace,
    Unload,
)

METRICS = {
    "tokens_hit": "vllm:prefix_cache_hits_total",
    "tokens_from_tiers": "vllm:external_prefix_cache_hits_total",
    "tier_blocks_evicted": "lora_serve:kv_tier_evicted_blocks_total",
    "preemptions": "vllm:num_preemptions_total",
    "adapter_evictions": "lora_serve:adapter_evictions_total",
    "engines_killed": RESTARTS,
}


class Kind(msgspec.Struct):
    """Counts of one kind of requests by outcome. refused: rightly."""

    requests: int = 0
    whole: int = 0
    begun: int = 0
    left: int = 0
    aborted: int = 0
    refused: int = 0
    wrong: int = 0
    choices: int = 0
    tokens: int = 0

    def add(self, heard: Heard, is_wrong: bool) -> None:
        self.requests += 1
        self.wrong += is_wrong
        self.choices += len(heard.choices)
        self.tokens += heard.num_tokens
        if heard.is_aborted:
            self.aborted += 1
        elif heard.is_whole:
            self.whole += 1
        elif heard.num_tokens:
            self.begun += 1
        elif heard.has_left:
            self.left += 1
        else:
            self.refused += 1


class FuzzCounts(msgspec.Struct):
    """The counts of all traces. first_seed: of the first one. events, counts: by name."""

    first_seed: int
    traces: int = 0
    kinds: dict[str, Kind] = {}
    events: dict[str, int] = {}
    counts: dict[str, int] = {}
    cached_tokens: int = 0
    prompt_tokens: int = 0
    troubles: int = 0

    def add(self, trace: Trace, run: TraceRun, findings: Sequence[Finding]) -> None:
        self.traces += 1
        self.troubles += len(run.troubles)
        wrong = {finding.event for finding in findings}
        for index, (event, record) in enumerate(zip(trace.events, run.records, strict=False)):
            if isinstance(event, Ask) and isinstance(record, Heard):
                self.kinds.setdefault(_kind(event), Kind()).add(record, index in wrong)
                self.cached_tokens += record.num_cached_tokens
                self.prompt_tokens += record.num_prompt_tokens
            for name in _done(event, record):
                self.events[name] = self.events.get(name, 0) + 1
        for name, metric in METRICS.items():
            self.counts[name] = self.counts.get(name, 0) + int(run.metrics.get(metric, 0))

    @property
    def num_requests(self) -> int:
        return sum(kind.requests for kind in self.kinds.values())

    @property
    def num_wrong(self) -> int:
        return sum(kind.wrong for kind in self.kinds.values())


def _kind(ask: Ask) -> str:
    if ask.pooling is not None:
        return "embeddings of tokens" if ask.pooling.pooling_type == "ALL" else "embeddings"
    if ask.talk is not None:
        return f"{ask.talk.route}, tools" if ask.talk.tools else ask.talk.route
    match ask.prompt:
        case Embeds():
            return "prompt_embeds"
        case Chat():
            return "chat"
        case Text():
            return "text"
    return "token ids"


def _done(event: Event, record: Record) -> Iterator[str]:
    """The names of what was done; concurrent calls count together and each for itself."""
    if isinstance(event, ConcurrentCalls) and isinstance(record, CalledAtOnce):
        yield "concurrent calls"
        for call, called in zip(event.calls, record.outcomes, strict=True):
            yield from _done(call, called)
    elif isinstance(record, Called) and record.is_done:
        yield _event_name(event)


def _event_name(event: Event) -> str:
    match event:
        case Load():
            return "loads"
        case Unload():
            return "unloads"
        case Reset():
            return "cache resets"
        case Abort():
            return "aborts"
        case PauseAndResume():
            return "pauses"
        case Damage():
            return "damages to disk"
        case Kill():
            return "kills"
    raise AssertionError(f"no call: {event}")
