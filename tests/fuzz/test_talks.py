"""Tools, reasoning, responses and messages: asked of the real routes, and judged with bugs in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replaced

from lora_serve.bench.http_stream import Origin
from lora_serve.chat.parts import Content, Part, Reasoning
from lora_serve.config import EngineConfig, ModelConfig, ServerConfig
from lora_serve.fuzz.client import FuzzClient
from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.judge import Judge
from lora_serve.fuzz.player import Player, ServerUnderTest
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.talks import ANSWERS, TEMPLATE, TOOLS
from lora_serve.fuzz.trace import API_KEYS, Ask, Chat, Talk, Trace, load_trace, save_trace
from lora_serve.generate_request import GenerateRequest
from lora_serve.outputs import OutputDelta
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.anthropic import messages
from lora_serve.server.http.auth import KeyRing
from lora_serve.server.openai import chat, chat_plan
from lora_serve.server.openai.chat_parts import ChoiceParts
from lora_serve.server.responses import output
from lora_serve.server.responses.store import StoredResponses
from lora_serve.structured_outputs import StructuredOutput
from tests.fakes.engine import FakeEngine, fake_config
from tests.server.clients import serving

SERVER = ServerConfig(chat_template=TEMPLATE, api_key=API_KEYS)
CALLS = SamplingParams(
    n=2, max_tokens=90, temperature=1.0, seed=3, logprobs=1, structured_outputs=ANSWERS[1]
)
ALONE = replaced(CALLS, n=1, max_tokens=40)
FORCED = replaced(ALONE, structured_outputs=None, max_tokens=60)
PLAIN = replaced(ALONE, structured_outputs=None)
THINKS = replaced(
    ALONE, structured_outputs=StructuredOutput.of(regex="<think>[a-z]{1,9}</think>[a-z]{1,9}")
)
MESSAGE = SamplingParams(max_tokens=60, temperature=1.0, seed=3)


def ask(
    params: SamplingParams,
    text: str,
    *,
    is_streamed: bool = False,
    api_key: int = 0,
    **talk: object,
) -> Ask:
    return Ask(
        prompt=Chat((("user", text),)),
        params=params,
        is_streamed=is_streamed,
        api_key=api_key,
        talk=Talk(**talk),
    )


TRACE = Trace(
    seed=0,
    concurrency=1,
    events=(
        ask(CALLS, "go", tools=("look", "walk")),
        ask(CALLS, "go", is_streamed=True, tools=("look", "walk")),
        ask(FORCED, "look", route="responses", tools=("look",), tool_choice="look", stored_as="a"),
        ask(FORCED, "walk", is_streamed=True, tools=("walk", "wait"), tool_choice="required"),
        ask(ALONE, "hm", is_streamed=True, route="responses", tools=("look",), stored_as="b"),
        ask(PLAIN, "so?", route="responses", continues="b"),
        ask(MESSAGE, "look", route="messages", tools=("look",), tool_choice="look"),
        ask(MESSAGE, "walk", is_streamed=True, route="messages", tools=("walk",)),
        ask(PLAIN, "and I?", route="responses", continues="b", api_key=1),
        ask(FORCED, "on", route="responses", tools=("walk",), tool_choice="walk", api_key=1),
        ask(THINKS, "why?"),
        ask(THINKS, "why?", is_streamed=True),
        ask(THINKS, "why?", route="responses"),
    ),
)


class ColdBacked(FakeEngine):
    """Answers with a cold engine's tokens, in pieces by turns of the choices."""

    def __init__(self, cold: ColdEngine) -> None:
        super().__init__(fake_config())
        self._llm = cold._llm
        self.tokenizer = cold._llm.tokenizer
        self.model_info = cold._llm.model_info

    async def generate(
        self, request: GenerateRequest, group: object = None
    ) -> AsyncGenerator[OutputDelta, None]:
        (output,) = self._llm.generate(request.prompt, request.params)
        wholes = [choice.delta for choice in output.outputs]
        for whole in wholes:
            first = whole.text[: len(whole.text) // 2]
            yield replaced(
                whole, text=first, token_ids=(), logprobs=(), finish_reason=None, stop_reason=None
            )
        for whole in wholes:
            yield replaced(whole, text=whole.text[len(whole.text) // 2 :])


@pytest.fixture(scope="module")
def cold(model_path: Path) -> Iterator[ColdEngine]:
    config = EngineConfig(model=ModelConfig(model=str(model_path), cpu_threads=1))
    engine = ColdEngine(config, [], SERVER)
    yield engine
    engine.close()


def findings(cold: ColdEngine, workspace: Path) -> dict[int | None, str]:
    async def play() -> dict[int | None, str]:
        async with serving(ColdBacked(cold), SERVER) as url:
            server = ServerUnderTest(
                client=FuzzClient(Origin.parse(url), API_KEYS),
                base_model="base/model",
                hidden_size=cold.hidden_size,
                versions=[],
                workspace=workspace,
            )
            records = await Player(server).play(TRACE)
        found = Judge(TRACE, records, cold, 16).findings()
        return {finding.event: finding.what for finding in found}

    return asyncio.run(play())


def test_what_the_routes_answer_is_what_the_reference_reads(
    cold: ColdEngine, tmp_path: Path
) -> None:
    assert findings(cold, tmp_path) == {}


def test_a_parser_that_keeps_the_state_of_another_choice_is_found(
    cold: ColdEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = chat.ChatAnswer._parts
    shared: dict[chat.ChatAnswer, object] = {}
    monkeypatch.setattr(
        chat.ChatAnswer, "_parts", lambda answer, _: shared.setdefault(answer, parts(answer, 0))
    )
    assert set(findings(cold, tmp_path)) == {0, 1}


def test_a_grammar_of_another_requests_tool_is_found(
    cold: ColdEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[object] = []
    forced_calls = chat_plan.forced_calls

    def stale(*given: object) -> object:
        if (found := forced_calls(*given)) is not None:
            first.append(found)
            return first[0]
        return None

    monkeypatch.setattr(chat_plan, "forced_calls", stale)
    assert set(findings(cold, tmp_path)) == {3, 9}


def test_a_response_that_continues_anothers_conversation_is_found(
    cold: ColdEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, ids = StoredResponses.get, list[str]()
    put = StoredResponses.put

    def note(store: StoredResponses, tenant: str, response_id: str, *rest: object) -> object:
        ids.append(response_id)
        return put(store, tenant, response_id, *rest)

    monkeypatch.setattr(StoredResponses, "put", note)
    monkeypatch.setattr(
        StoredResponses, "get", lambda store, tenant, _, field: get(store, tenant, ids[0], field)
    )
    assert set(findings(cold, tmp_path)) == {5}


def test_a_response_that_continues_one_of_another_api_key_is_found(
    cold: ColdEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyRing, "tenant", lambda ring, caller: "all")
    assert findings(cold, tmp_path) == {8: "continues a response of another API key"}


def test_arguments_of_another_requests_call_are_found(
    cold: ColdEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, texts = output._Call.__init__, list[str]()

    def shared(call: output._Call, *given: object) -> None:
        begin(call, *given)
        call._texts = texts

    monkeypatch.setattr(output._Call, "__init__", shared)
    assert 9 in findings(cold, tmp_path)


def test_reasoning_that_is_told_as_content_is_found(
    cold: ColdEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ChoiceParts._parts

    def flat(choice: ChoiceParts, text: str, is_last: bool) -> list[Part]:
        parts = read(choice, text, is_last)
        return [Content(part.text) if isinstance(part, Reasoning) else part for part in parts]

    monkeypatch.setattr(ChoiceParts, "_parts", flat)
    assert {10, 11} <= set(findings(cold, tmp_path))


def test_a_message_has_the_models_own_settings_which_its_route_cannot_say(
    cold: ColdEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold._chats, "_own_settings", {"repetition_penalty": 1.3, "top_k": 5})
    message, response = ask(MESSAGE, "go", route="messages"), ask(PLAIN, "go", route="responses")
    assert cold._chats.plan(message, ()).params == replaced(MESSAGE, repetition_penalty=1.3)
    assert cold._chats.plan(response, ()).params == PLAIN


def test_blocks_of_another_message_are_found(
    cold: ColdEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[object] = []

    def first(*given: object) -> object:
        writers.append(writer(*given))
        return writers[0]

    writer = messages.BlockWriter
    monkeypatch.setattr(messages, "BlockWriter", first)
    assert set(findings(cold, tmp_path)) == {7}


def test_traces_draw_conversations_of_every_route_and_are_kept_with_them(tmp_path: Path) -> None:
    scope = Scope(vocab_size=200, num_versions=2)
    traces = [make_trace(seed, scope) for seed in range(4)]
    asks = [event for trace in traces for event in trace.events if isinstance(event, Ask)]
    talks = [ask.talk for ask in asks if ask.talk is not None]
    assert {talk.route for talk in talks} == {"chat", "responses", "messages"}
    assert {talk.tool_choice for talk in talks} == {"auto", "none", "required", *TOOLS}
    assert {ask.api_key for ask in asks} == set(range(len(API_KEYS)))
    assert not any(ask.params.thinking_token_budget for ask in asks), "nothing marks reasoning"
    marked = make_trace(0, replace(scope, marks_reasoning=True))
    budgets = {ask.params.thinking_token_budget for ask in marked.events if isinstance(ask, Ask)}
    assert {None, 0, 5} < budgets
    stored = {talk.stored_as for talk in talks} - {""}
    assert {talk.continues for talk in talks} & stored
    save_trace(traces[0], tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == traces[0]
