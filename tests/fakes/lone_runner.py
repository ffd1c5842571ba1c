"""Plays traces without a server: answers requests alone, maybe with the bug of the stale cache."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field

from lora_serve.fuzz.answers import Called, CalledAtOnce, Heard
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.runners import TraceRun
from lora_serve.fuzz.trace import (
    Abort,
    AdapterCall,
    Ask,
    ConcurrentCalls,
    Load,
    Reset,
    Trace,
    Unload,
)
from lora_serve.identity import BASE_MODEL, NoAdapter


@dataclass
class LoneRunner:
    """is_stale: a prompt asked again under an adapter's name gets the first version's answer."""

    cold: ColdEngine
    fingerprints: list[str]
    is_stale: bool = False
    num_played: int = field(default=0, init=False)

    def play(self, trace: Trace) -> TraceRun:
        self.num_played += 1
        named: dict[str, int] = {}
        first: dict[object, int | NoAdapter] = {}
        run = TraceRun()
        cold = self.cold.under(trace.flags)
        for event in trace.events:
            begin = time.monotonic()
            if isinstance(event, Ask):
                run.records.append(self._ask(cold, event, named, first, begin))
                continue
            if isinstance(event, ConcurrentCalls):
                statuses = [_call(call, named) for call in event.calls]
                end = time.monotonic()
                run.records.append(CalledAtOnce(tuple(Called(begin, end, s) for s in statuses)))
                continue
            status, message = 200, ""
            if isinstance(event, Load | Unload | Reset):
                status = _call(event, named)
            elif isinstance(event, Abort):
                message = '{"aborted": 0}'  # each request has been answered before the next event
            run.records.append(Called(begin, time.monotonic(), status, message))
        return run

    def _ask(
        self,
        cold: ColdEngine,
        ask: Ask,
        named: dict[str, int],
        first: dict[object, int | NoAdapter],
        begin: float,
    ) -> Heard:
        heard = Heard(begin, status=404)
        name = ask.adapter
        if name is BASE_MODEL or name in named:
            version = BASE_MODEL if name is BASE_MODEL else named[name]
            used = first.setdefault((name, ask.prompt), version)
            right = cold.answer(ask, used if self.is_stale else version)
            heard.status, heard.is_whole = 200, True
            heard.prompt_logprobs = right.prompt_logprobs
            heard.choices = {i: copy.deepcopy(one) for i, one in enumerate(right.choices)}
            for choice in heard.choices.values():
                choice.fingerprints = {self._fingerprint(version)}
        heard.end = time.monotonic()
        return heard

    def _fingerprint(self, version: int | NoAdapter) -> str:
        if version is BASE_MODEL:
            return self.cold.fingerprint
        return f"{self.cold.fingerprint}-{self.fingerprints[version]}-g0"


def _call(call: AdapterCall, named: dict[str, int]) -> int:
    """The status with which a server answers."""
    if isinstance(call, Load):
        if call.lora_name in named and not call.in_place:
            return 400
        named[call.lora_name] = call.version
        return 200
    if call.lora_name is not None and call.lora_name not in named:
        return 404
    if isinstance(call, Unload):
        del named[call.lora_name]
    return 200
