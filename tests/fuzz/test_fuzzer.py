"""The whole of the fuzzer but HTTP: traces, cold answers, judgement and shrinking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.fuzz.fuzzer import Fuzzer
from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.trace import Ask, ConcurrentCalls, Load, Reset, Unload, load_trace, save_trace
from lora_serve.fuzz.versions import write_versions
from tests.fakes.lone_runner import LoneRunner

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def cold(
    model_path: Path, adapter_paths: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ColdEngine]:
    versions = write_versions(adapter_paths[:2], tmp_path_factory.mktemp("library") / "versions")
    config = EngineConfig(model=ModelConfig(model=str(model_path), cpu_threads=1))
    engine = ColdEngine(config, versions)
    yield engine
    engine.close()


@pytest.fixture
def scope(cold: ColdEngine) -> Scope:
    return Scope(
        vocab_size=min(200, cold.vocab_size),
        num_versions=cold.num_versions,
        num_requests=40,
        has_chat=False,
        has_embeds=False,
    )


def lone(cold: ColdEngine, *, is_stale: bool) -> LoneRunner:
    return LoneRunner(cold, cold.digests, is_stale)


def test_right_answers_have_no_findings(cold: ColdEngine, scope: Scope) -> None:
    fuzzer = Fuzzer(lone(cold, is_stale=False), cold, BLOCK_SIZE)
    verdict = fuzzer.check(make_trace(1, scope))
    assert verdict.lines() == []
    assert len(verdict.run.records) > 40


def test_a_stale_answer_is_found_and_its_trace_made_small(
    cold: ColdEngine, scope: Scope, tmp_path: Path
) -> None:
    fuzzer = Fuzzer(lone(cold, is_stale=True), cold, BLOCK_SIZE)
    traces = (make_trace(seed, scope) for seed in range(20))
    trace, verdict = next(
        (trace, verdict) for trace in traces if not (verdict := fuzzer.check(trace)).is_clean
    )
    assert "it is the answer of version" in verdict.lines()[0]
    small = fuzzer.shrink(trace, 60, lambda smaller: None)
    kinds = [type(event) for event in small.events]
    assert kinds == [Load, Ask, Load, Ask]  # what the bug needs, and nothing more
    save_trace(small, tmp_path / "small.json")
    again = load_trace(tmp_path / "small.json")
    assert again == small
    assert not fuzzer.check(again).is_clean
    sound = replace(fuzzer, runner=lone(cold, is_stale=False))
    assert sound.check(again).is_clean


def test_a_seed_gives_one_trace(scope: Scope) -> None:
    assert make_trace(3, scope) == make_trace(3, scope)
    assert make_trace(3, scope) != make_trace(4, scope)


def test_traces_send_admin_calls_at_once_and_are_kept_with_them(
    scope: Scope, tmp_path: Path
) -> None:
    traces = [make_trace(seed, scope) for seed in range(20)]
    concurrent = [e for trace in traces for e in trace.events if isinstance(e, ConcurrentCalls)]
    assert {len(event.calls) for event in concurrent} == {2, 3}
    assert {type(call) for event in concurrent for call in event.calls} == {Load, Unload, Reset}
    assert any(not load.in_place for trace in traces for load in trace.loads)
    for trace in traces:
        save_trace(trace, tmp_path / "trace.json")
        assert load_trace(tmp_path / "trace.json") == trace
