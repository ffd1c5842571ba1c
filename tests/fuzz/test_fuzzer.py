"""The whole of the fuzzer but HTTP: traces, cold answers, judgement and shrinking."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from msgspec.structs import replace as replaced

from lora_serve.config import EngineConfig, ModelConfig, ServerConfig
from lora_serve.config.model import LOGPROBS_MODES
from lora_serve.fuzz.answers import Called, Choice, Heard
from lora_serve.fuzz.bodies import body
from lora_serve.fuzz.cold_chats import ColdChats
from lora_serve.fuzz.crowds import ANSWER_TOKENS, SIZES
from lora_serve.fuzz.fuzzer import Fuzzer
from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.grammars import TAGS
from lora_serve.fuzz.judge import Judge
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.runners import TraceRun
from lora_serve.fuzz.trace import (
    Abort,
    Ask,
    Chat,
    ConcurrentCalls,
    Load,
    PauseAndResume,
    Reset,
    Tokens,
    Trace,
    Unload,
    load_trace,
    save_trace,
    shortened,
)
from lora_serve.fuzz.versions import INVOCATION, write_versions
from lora_serve.identity import BASE_MODEL
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.openai.constraints import parse_response_format, parse_structured_outputs
from lora_serve.structured_output.structural_tag import parse_structural_tag
from lora_serve.structured_outputs import StructuredOutput
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


def test_the_right_answer_of_a_chat_reasons_before_its_grammar_as_a_servers_does(
    cold: ColdEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, markers = cold._llm, {"<think>": [80], "</think>": [81]}
    encode = llm._encode
    monkeypatch.setattr(llm, "_encode", lambda text: markers.get(text) or encode(text))
    template = ServerConfig(chat_template="hi{# </think> #}<think>")
    assert not cold.marks_reasoning
    monkeypatch.setattr(cold, "_chats", ColdChats(llm, template))
    assert cold.marks_reasoning
    params = SamplingParams(
        max_tokens=9, logit_bias={81: 100.0}, structured_outputs=StructuredOutput.of(choice=["no"])
    )
    (choice,) = cold.answer(Ask(prompt=Chat((("user", "hi"),)), params=params), BASE_MODEL).choices
    assert choice.token_ids[0] == 81
    assert llm.tokenizer.decode(choice.token_ids[1:]) == "no"


class SpoilsEmbeddings(LoneRunner):
    """Gives each embedding's first value another sign."""

    def play(self, trace: Trace) -> TraceRun:
        run = super().play(trace)
        for record in run.records:
            if isinstance(record, Heard):
                for choice in record.choices.values():
                    values = bytearray(base64.b64decode(choice.embedding))
                    values[3:4] = bytes(value ^ 128 for value in values[3:4])
                    choice.embedding = base64.b64encode(values).decode()
        return run


def test_traces_ask_for_embeddings_which_are_judged(cold: ColdEngine, scope: Scope) -> None:
    trace = make_trace(1, scope)
    asks = [event for event in trace.events if isinstance(event, Ask)]
    assert 0 < sum(ask.pooling is not None for ask in asks) < len(asks) / 2
    spoiling = SpoilsEmbeddings(cold, cold.digests)
    verdict = Fuzzer(spoiling, cold, BLOCK_SIZE).check(trace)
    wrong = {finding.event for finding in verdict.findings}
    given = {
        index
        for index, (event, record) in enumerate(zip(trace.events, verdict.run.records, strict=True))
        if isinstance(event, Ask) and event.pooling is not None and record.is_whole
    }
    assert wrong == given != set()


class TellsOtherLogprobs(LoneRunner):
    """Gives the logprobs of the default mode, whatever the trace's flags say."""

    def play(self, trace: Trace) -> TraceRun:
        return super().play(replaced(trace, flags=()))


def test_traces_draw_every_mode_of_logprobs_and_that_of_another_is_found(
    cold: ColdEngine, scope: Scope
) -> None:
    traces = [make_trace(seed, replace(scope, num_requests=10)) for seed in range(40)]
    modes = {
        trace.flags[trace.flags.index("--logprobs-mode") + 1]
        for trace in traces
        if "--logprobs-mode" in trace.flags
    }
    assert modes == set(LOGPROBS_MODES)
    trace = next(trace for trace in traces if "processed_logits" in trace.flags)
    assert Fuzzer(lone(cold, is_stale=False), cold, BLOCK_SIZE).check(trace).lines() == []
    other = Fuzzer(TellsOtherLogprobs(cold, cold.digests), cold, BLOCK_SIZE)
    assert any(": logprob 0 is" in line for line in other.check(trace).lines())
    pinned = replace(other, flags=("--logprobs-mode", "raw_logprobs"))
    assert pinned.check(trace).is_clean


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


def test_traces_crowd_servers_of_their_own_and_a_share_comes_late(scope: Scope) -> None:
    def crowds(scope: Scope) -> list[tuple[Ask, int, Ask]]:
        """Who asked first, how many the crowd were, and who came late."""
        asks = [
            (trace.seed, event)
            for trace in (make_trace(seed, scope) for seed in range(20))
            for event in trace.events
            if isinstance(event, Ask)
        ]
        runs = [list(run) for _, run in groupby(asks, lambda each: _is_of_a_crowd(each[1]))]
        return [
            (before[-1][1], len(crowd), after[0][1])
            for before, crowd, after in zip(runs, runs[1:], runs[2:], strict=False)
            if _is_of_a_crowd(crowd[0][1])
        ]

    drawn = crowds(scope)
    assert {size for _, size, _ in drawn} == set(SIZES)
    for first, _, late in drawn:
        assert first.lora_name == late.lora_name
        assert first.api_key == late.api_key == 0
    assert crowds(replace(scope, fixed_flags=True)) == []


def _is_of_a_crowd(ask: Ask) -> bool:
    is_short = isinstance(ask.prompt, Tokens) and len(ask.prompt.token_ids) == 4 + len(INVOCATION)
    return (
        ask.api_key == 1
        and is_short
        and ask.params == SamplingParams(max_tokens=ANSWER_TOKENS, seed=ask.params.seed)
    )


def test_traces_pause_servers_and_are_kept_with_that(scope: Scope, tmp_path: Path) -> None:
    traces = [make_trace(seed, scope) for seed in range(20)]
    pauses = [
        event for trace in traces for event in trace.events if isinstance(event, PauseAndResume)
    ]
    assert {pause.mode for pause in pauses} == {"keep", "wait"}
    for trace in traces:
        save_trace(trace, tmp_path / "trace.json")
        assert load_trace(tmp_path / "trace.json") == trace


def aborted(cold: ColdEngine, ask: Ask, num_tokens: int) -> Choice:
    """The right answer's beginning, as a server tells it that was asked to end it there."""
    cut = replaced(ask, params=shortened(ask.params, num_tokens))
    (right,) = cold.answer(cut, BASE_MODEL).choices
    return replace(right, finish_reason="abort", fingerprints={cold.fingerprint})


def test_an_answer_that_a_call_ended_is_judged_as_far_as_it_came(cold: ColdEngine) -> None:
    plain = Ask(
        prompt=Tokens(tuple(range(5, 40))),
        params=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0),
    )
    shown = aborted(cold, plain, 6).text
    # What may be the begin of a stop string is held back, and told when the answer is ended.
    ask = replaced(plain, params=replaced(plain.params, stop=(f"{shown[-1]}\0",)))
    right = aborted(cold, ask, 6)
    assert right.text == shown

    def findings(
        choice: Choice, *, told: int = 1, begin: float = 1.0, asked: Ask = ask
    ) -> list[str]:
        heard = Heard(0.0, 9.0, 200, is_whole=True, choices={0: choice})
        trace = Trace(seed=0, events=(asked, Abort(newest=1)))
        called = Called(begin, begin + 1, 200, f'{{"aborted": {told}}}')
        judged = Judge(trace, [heard, called], cold, BLOCK_SIZE)
        return [finding.what for finding in judged.findings()]

    assert findings(right) == []
    unbegun = Choice(finish_reason="abort", fingerprints={cold.fingerprint})
    assert findings(unbegun) == []
    other = right.token_ids[-1] + 1
    for wrong, what in (
        (replace(right, text=right.text[:-1]), "text is"),
        (replace(right, token_ids=[*right.token_ids[:-1], other]), f"token 5 is {other}"),
        (replace(right, logprobs=right.logprobs[:-1]), "logprobs is"),
        (replace(unbegun, text="a"), "it has no tokens, and tells ['a']"),
    ):
        (found,) = findings(wrong)
        assert what in found
    patient = replaced(plain, params=replaced(plain.params, min_tokens=9))
    assert findings(aborted(cold, patient, 6), asked=patient) == []
    # Ended before its adapter was looked up, which is not there.
    stranger = replaced(ask, lora_name="gone")
    empty = Choice(finish_reason="cancelled", items=[["message", ""]])
    assert findings(empty, asked=stranger) == []
    (found,) = findings(replace(empty, items=[["message", "a"]]), asked=stranger)
    assert "it has no tokens, and tells ['', 'a']" in found
    assert findings(right, told=0) == ["0 requests aborted, but it was 1 to 1 of them"]
    assert findings(right, told=0, begin=10.0) == ["aborted, though no call named it while it ran"]


def test_traces_end_requests_and_draw_structural_tags_and_are_kept_with_them(
    scope: Scope, tmp_path: Path
) -> None:
    traces = [make_trace(seed, scope) for seed in range(30)]
    events = [event for trace in traces for event in trace.events]
    assert {event.newest for event in events if isinstance(event, Abort)} == {1, 2, 8, None}
    asks = [event for event in events if isinstance(event, Ask)]
    drawn = {
        each.params.structured_outputs: each
        for each in asks
        if each.params.structured_outputs in TAGS
    }
    assert drawn.keys() == {*TAGS}
    for tag, ask in drawn.items():
        asked = body(ask, "model", "", 8)
        parsed = parse_response_format(asked.get("response_format"))
        parsed = parsed or parse_structured_outputs(asked.get("structured_outputs"))
        assert parsed is not None
        assert parse_structural_tag(parsed.text) == parse_structural_tag(tag.text)
    for trace in traces:
        save_trace(trace, tmp_path / "trace.json")
        assert load_trace(tmp_path / "trace.json") == trace
    shared = [make_trace(seed, replace(scope, fixed_flags=True)) for seed in range(30)]
    newest = {e.newest for trace in shared for e in trace.events if isinstance(e, Abort)}
    assert newest == {1, 2, 4, 8}, "others' requests at a URL are ended"
