"""Tool calls and reasoning in chats, over HTTP: what a model writes, and what a client reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.generate_request import GenerateRequest
from lora_serve.prompts import TokensPrompt
from lora_serve.server.anthropic import protocol
from lora_serve.server.app import create_app
from lora_serve.server.openai.protocol import ChatBody
from lora_serve.structured_outputs import ReasoningTokens
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import TURN
from tests.server.clients import client_for, error_of, events, serving

URL = "/v1/chat/completions"
QWEN = "<tool_call> </think>"
HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ZURICH = '{"city": "Zürich"}'
CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ZURICH}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)

Json = dict[str, Any]


class ModelThatWrites(FakeEngine):
    """Answers every prompt with `text`. prompt: the last one."""

    text = ""
    prompt = ""

    def _text(self, request: GenerateRequest, index: int) -> tuple[str, str, str | None]:
        assert request.params.max_tokens is not None
        assert isinstance(request.prompt, TokensPrompt)
        self.prompt = self.tokenizer.decode(request.prompt.token_ids)
        data = self.text.encode()
        shown = data[: request.params.max_tokens].decode("utf-8", "ignore")
        return shown, "stop" if len(shown.encode()) == len(data) else "length", None


@pytest.fixture
def model() -> ModelThatWrites:
    engine = ModelThatWrites()
    engine.tokenizer.chat_template = QWEN
    return engine


@pytest.fixture
async def client(model: ModelThatWrites) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(model) as client:
        yield client


async def ask(client: httpx.AsyncClient, **fields: object) -> Json:
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 200, **fields}
    response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **fields: object) -> list[Json]:
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 200, "stream": True, **fields}
    return events((await client.post(URL, json=body)).text)


def joined(chunks: list[Json], index: int = 0) -> Json:
    """The message that a client puts together, as OpenAI's does."""
    message: Json = {"content": None, "reasoning_content": None, "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for field in ("content", "reasoning_content"):
                if delta.get(field):
                    message[field] = (message[field] or "") + delta[field]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(
                        {"id": call["id"], "type": call["type"], "function": call["function"]}
                    )
                else:
                    assert set(call) == {"index", "function"}
                    begun = message["tool_calls"][call["index"]]["function"]
                    begun["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


async def test_calls_are_told_with_ids_names_and_arguments(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = "Let me see.\n" + CALLS
    (choice,) = (await ask(client))["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    first, second = message["tool_calls"]
    assert first["type"] == "function"
    assert first["function"] == {"name": "get_weather", "arguments": ZURICH}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]


async def test_content_is_null_beside_calls_alone(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = CALLS
    message = (await ask(client))["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message


async def test_a_stream_tells_the_same_piece_by_piece(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = "<think>\nhm\n</think>\n\nLet me see.\n" + CALLS
    whole = (await ask(client, n=2))["choices"]
    chunks = await stream(client, n=2)
    for choice in whole:
        message = joined(chunks, choice["index"])
        assert message.pop("finish_reason") == "tool_calls"
        assert message == {key: choice["message"][key] for key in message}
    pieces = [c["choices"][0]["delta"].get("tool_calls") for c in chunks if c["choices"]]
    assert sum(piece is not None for piece in pieces) > len(ZURICH)


async def test_a_chunk_tells_of_a_call_once(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    """Some clients read a chunk's first delta alone."""
    model.text = ZURICH
    named = {"type": "function", "function": {"name": "get_weather"}}
    chunks = await stream(client, tool_choice=named)
    deltas = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in chunks]
    assert {len(calls) for calls in deltas} == {0, 1}
    (call,) = joined(chunks)["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ZURICH}


async def test_equal_requests_give_calls_the_same_ids_and_choices_different_ones(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = CALLS
    answers = [await ask(client, n=2) for _ in range(2)]
    other = await ask(client, messages=[*HELLO, *HELLO])
    ids = [
        [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
        for answer in (*answers, other)
    ]
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 6


async def test_mistrals_ids_have_nine_letters(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.tokenizer.chat_template = "[TOOL_CALLS]"
    model.text = "[TOOL_CALLS]now[ARGS]{}"
    async with client_for(model) as client:
        (call,) = (await ask(client))["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


async def test_an_answer_without_calls_is_what_it_was(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = "No tool is needed.\n"
    (choice,) = (await ask(client))["choices"]
    assert choice["message"]["content"] == "No tool is needed.\n"
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


async def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = CALLS
    (choice,) = (await ask(client, max_tokens=60))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert ZURICH.startswith(call["function"]["arguments"])
    assert choice["finish_reason"] == "length"


async def test_a_call_of_an_unknown_tool_is_content(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = CALLS
    (choice,) = (await ask(client, tools=TOOLS[1:]))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert choice["message"]["content"] == CALLS[: CALLS.index("\n<tool_call>", 5)]


async def test_without_parallel_calls_the_first_is_told(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = CALLS
    (call,) = (await ask(client, parallel_tool_calls=False))["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"


async def test_required_is_a_list_of_calls_under_a_grammar(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = f'[{{"name": "get_weather", "parameters": {ZURICH}}}]'
    (choice,) = (await ask(client, tool_choice="required"))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ZURICH}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    await ask(client, tool_choice="required", parallel_tool_calls=False)
    wide, narrow = (request.params.structured_outputs for request in model.seen)
    assert wide is not None
    assert narrow is not None
    assert "maxItems" not in wide.text
    assert json.loads(narrow.text) == {**json.loads(wide.text), "maxItems": 1}


async def test_a_format_of_texts_is_taken_beside_calls_that_are_forced(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    """Agents send both with every request; the answer has no text that the format would hold."""
    model.text = f'[{{"name": "get_weather", "parameters": {ZURICH}}}]'
    plain = await ask(client, tool_choice="required")
    both = await ask(client, tool_choice="required", response_format={"type": "json_object"})
    assert both["choices"] == plain["choices"]
    first, second = (request.params.structured_outputs for request in model.seen)
    assert first == second


async def test_a_tool_is_a_function_though_it_does_not_say_so(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = f'[{{"name": "get_weather", "parameters": {ZURICH}}}]'
    tools = [{"function": tool["function"], "cache_control": {}} for tool in TOOLS]
    plain, bare = [await ask(client, tool_choice="required", tools=each) for each in (TOOLS, tools)]
    assert bare["choices"] == plain["choices"]


async def test_a_named_tools_arguments_are_the_answer(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = ZURICH
    named: Json = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    (choice,) = (await ask(client, **named))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ZURICH}
    assert choice["finish_reason"] == "stop"  # as OpenAI's
    message = joined(await stream(client, **named))
    assert message["tool_calls"] == [call]
    (output, _) = (request.params.structured_outputs for request in model.seen)
    assert output is not None
    assert json.loads(output.text) == TOOLS[0]["function"]["parameters"]  # type: ignore[index]


async def test_forced_calls_need_no_known_format(model: ModelThatWrites) -> None:
    model.tokenizer.chat_template = ""
    model.text = '[{"name": "now", "parameters": {}}]'
    async with client_for(model) as client:
        (call,) = (await ask(client, tool_choice="required"))["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "now"


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
async def test_calls_are_text_unless_tools_may_be_called(
    model: ModelThatWrites, client: httpx.AsyncClient, fields: Json
) -> None:
    model.text = CALLS
    (choice,) = (await ask(client, **fields))["choices"]
    assert choice["message"]["content"] == CALLS
    assert choice["finish_reason"] == "stop"


async def test_logprobs_name_all_tokens_also_of_calls(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = CALLS
    fields: Json = {"logprobs": True, "return_token_ids": True}
    (choice,) = (await ask(client, **fields))["choices"]
    assert len(choice["logprobs"]["content"]) == len(CALLS.encode()) == len(choice["token_ids"])
    chunks = await stream(client, **fields)
    told = [c["choices"][0]["logprobs"]["content"] for c in chunks[1:]]
    assert [entry for entries in told for entry in entries] == choice["logprobs"]["content"]


async def test_reasoning_is_told_apart_and_left_out_on_request(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = "<think>\nhm\n</think>\n\nYes."
    message = (await ask(client, tools=None))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    message = (await ask(client, include_reasoning=False))["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "Yes."
    assert joined(await stream(client, include_reasoning=False))["reasoning_content"] is None


async def test_reasoning_that_the_prompt_began_needs_no_marker(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = "hm</think>Yes."
    messages = [*HELLO, {"role": "assistant", "content": "<think>\n"}]
    answer = await ask(client, messages=messages, continue_final_message=True)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
            {"enable_thinking": True, "thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
def test_reasoning_effort_becomes_what_templates_ask_for(fields: Json, expected: Json) -> None:
    assert ChatBody(messages=HELLO, **fields).template_kwargs == expected


async def test_a_parser_can_be_named_or_turned_off(model: ModelThatWrites) -> None:
    model.text = "<think>hm</think>" + CALLS
    config = ServerConfig(reasoning_parser="none", tool_call_parser="none")
    async with client_for(model, config) as client:
        for tools in (None, TOOLS):
            answer = await ask(client, tools=tools)
            assert answer["choices"][0]["message"]["content"] == model.text
            assert answer["choices"][0]["finish_reason"] == "stop"
    model.text = "[now()]"
    async with client_for(model, ServerConfig(tool_call_parser="pythonic")) as client:
        (call,) = (await ask(client))["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "now"


async def test_a_template_of_an_unknown_format_is_refused_where_calls_were_asked_for(
    model: ModelThatWrites,
) -> None:
    """The server knows its own template's format, but not that of the one the request brings."""
    model.text = CALLS
    body = {"messages": HELLO, "tools": TOOLS, "chat_template": "no tools"}
    asked_for = ServerConfig(enable_auto_tool_choice=True, trust_request_chat_template=True)
    async with client_for(model, asked_for) as client:
        error = error_of(await client.post(URL, json=body), 400)
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    async with client_for(model, ServerConfig(trust_request_chat_template=True)) as client:
        (choice,) = (await client.post(URL, json=body)).json()["choices"]
    assert choice["message"]["content"] == CALLS


async def test_tools_that_the_template_does_not_write_are_warned_of_once(
    model: ModelThatWrites, caplog: pytest.LogCaptureFixture
) -> None:
    model.tokenizer.chat_template = "{{ messages }}"
    async with client_for(model) as client:
        for _ in range(2):
            assert (await client.post(URL, json={"messages": HELLO, "tools": TOOLS})).is_success
    warned = [r.message for r in caplog.records if "the chat template writes none" in r.message]
    assert len(warned) == 1


async def test_a_role_may_be_one_that_the_template_names(model: ModelThatWrites) -> None:
    body = {"messages": [{"role": "narrator", "content": "x"}], "chat_template": "{{ 'narrator' }}"}
    config = ServerConfig(trust_request_chat_template=True)
    async with client_for(model, config) as client:
        error = error_of(await client.post(URL, json=body), 400)
        assert error["message"] == "unexpected role 'narrator'"  # the template's own words
        body["chat_template"] = "no roles"
        error = error_of(await client.post(URL, json=body), 400)
    assert error["param"] == "messages[0].role"


async def test_of_allowed_tools_alone_calls_are_told(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = CALLS
    only_now = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": only_now}}
    message = (await ask(client, tool_choice=choice))["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    choice["allowed_tools"]["mode"] = "required"
    await ask(client, tool_choice=choice)
    assert "now" in str(model.seen[-1].params.structured_outputs)
    assert "get_weather" not in str(model.seen[-1].params.structured_outputs)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_reasoning_is_told_by_both_names_and_its_tokens_are_counted(
    model: ModelThatWrites, client: httpx.AsyncClient, is_streamed: bool
) -> None:
    model.text = "<think>hm</think>Hi" + CALLS
    if is_streamed:
        chunks = await stream(client, stream_options={"include_usage": True})
        usage = chunks[-1]["usage"]
        told = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    else:
        answer = await ask(client)
        usage, told = answer["usage"], [answer["choices"][0]["message"]]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>")}
    assert "".join(each.get("reasoning", "") for each in told) == "hm"
    assert all(each.get("reasoning") == each.get("reasoning_content") for each in told)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_reasoning_that_is_left_out_has_no_tokens_and_no_logprobs_either(
    model: ModelThatWrites, client: httpx.AsyncClient, is_streamed: bool
) -> None:
    """They would tell it all the same."""
    model.text = "<think>hm</think>Hi"
    fields = {"logprobs": True, "return_token_ids": True, "include_reasoning": False}
    if is_streamed:
        chunks = await stream(client, **fields, stream_options={"include_usage": True})
        choices, usage = [c for chunk in chunks for c in chunk["choices"]], chunks[-1]["usage"]
        assert len(choices) == 3  # the role, and a token each
        choices = choices[1:]
    else:
        answer = await ask(client, **fields)
        choices, usage = answer["choices"], answer["usage"]
    assert [token_id for each in choices for token_id in each["token_ids"]] == list(b"Hi")
    told = [entry for each in choices for entry in each["logprobs"]["content"]]
    assert [entry["token"] for entry in told] == ["H", "i"]
    assert usage["completion_tokens"] == len(model.text)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")


async def test_markers_that_are_special_tokens_stay_in_the_text_for_the_parser(
    model: ModelThatWrites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        model.tokenizer, "special_token_id", {"<tool_call>": TURN}.get, raising=True
    )
    async with client_for(model) as client:
        await ask(client)
        await ask(client, tool_choice="none")
    assert [request.shown_special_tokens for request in model.seen] == [(TURN,), ()]


def test_a_server_can_ask_to_know_the_format_of_calls(model: ModelThatWrites) -> None:
    config = ServerConfig(enable_auto_tool_choice=True)
    create_app(model, config)
    model.tokenizer.chat_template = "no tools"
    with pytest.raises(ConfigError, match=r"--enable-auto-tool-choice.*--tool-call-parser"):
        create_app(model, config)


TOO_LARGE = {"type": "object", "description": "x" * 65_536}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, "pattern"),
        ({"tools": TOOLS[:1] * 2}, "tools", "two tools named get_weather"),
        ({"tools": [TOOLS[1]] * 129}, "tools", "128"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": TOO_LARGE}}]},
            "tools[0]",
            "at most 65536",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0]",
            "arguments are an object",
        ),
        ({"tool_choice": "always"}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "the name of a tool"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "fly, which is none of the tools",
        ),
        (
            {"tool_choice": "required", "structured_outputs": {"json_object": True}},
            "tool_choice",
            "structured_outputs exclude each other",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "required",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "must be the text of a JSON object",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'medium'"),
    ],
)
async def test_what_is_wrong_with_tools_is_named(
    client: httpx.AsyncClient, fields: Json, param: str | None, message: str
) -> None:
    response = await client.post(URL, json={"messages": HELLO, "tools": TOOLS, **fields})
    error = error_of(response, 400)
    assert message in str(error["message"])
    assert param is None or error["param"] == param


async def test_calls_and_reasoning_come_back_in_the_conversation(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    """Just as the client got them, with the result of the call."""
    model.text = "<think>hm</think>" + CALLS
    message = (await ask(client))["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"t": 20})}
        for call in message["tool_calls"]
    ]
    await ask(client, messages=[*HELLO, message, *results])
    assert "hm" in model.prompt
    for call in message["tool_calls"]:
        assert str(json.loads(call["function"]["arguments"])) in model.prompt


async def test_openais_client_calls_a_tool_and_goes_on(model: ModelThatWrites) -> None:
    model.text = "<think>hm</think>" + CALLS
    async with (
        serving(model) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as api,
    ):
        create = api.chat.completions.create
        answer = await create(model="base/model", messages=HELLO, tools=TOOLS, max_tokens=200)
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "20"}
            for call in message.tool_calls
        ]
        history = [*HELLO, message, *results]
        async with api.chat.completions.stream(
            model="base/model", messages=history, tools=TOOLS, max_tokens=200
        ) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("get_weather", ZURICH), ("now", "{}")]
    assert streamed.finish_reason == answer.choices[0].finish_reason == "tool_calls"
    again = [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls]
    assert again == calls


@pytest.fixture
def thinker(model: ModelThatWrites, monkeypatch: pytest.MonkeyPatch) -> ModelThatWrites:
    """Its tokenizer has the markers of reasoning as tokens."""
    encode = model.tokenizer.encode
    markers = {"<think>": [250], "</think>": [251]}
    monkeypatch.setattr(
        model.tokenizer,
        "encode",
        lambda text, add_special_tokens=True: markers.get(text) or encode(text, add_special_tokens),
    )
    return model


async def test_a_grammar_waits_until_the_reasoning_has_ended(
    thinker: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    thinker.text = f"<think>\nWhere?\n</think>\n\n{ZURICH}"
    body: Json = {"tools": None, "response_format": {"type": "json_object"}}
    message = (await ask(client, **body))["choices"][0]["message"]
    assert message["content"] == ZURICH
    assert message["reasoning_content"] == "Where?"
    assert thinker.seen[-1].params.reasoning == ReasoningTokens(250, 251, is_open=False)


async def test_a_call_that_is_forced_follows_the_reasoning(
    thinker: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    thinker.text = f'<think>Which?</think>[{{"name": "now", "parameters": {ZURICH}}}]'
    message = (await ask(client, tool_choice="required"))["choices"][0]["message"]
    assert message["reasoning_content"] == "Which?"
    assert message["tool_calls"][0]["function"]["name"] == "now"
    assert thinker.seen[-1].params.reasoning is not None


async def test_a_prompt_that_has_begun_the_reasoning_leaves_it_open(
    thinker: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    last = {"role": "assistant", "content": "<think>"}
    body: Json = {"messages": [*HELLO, last], "tools": None, "guided_regex": "a"}
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    await ask(client, **body)
    assert thinker.seen[-1].params.reasoning == ReasoningTokens(250, 251, is_open=True)


async def test_a_budget_of_thinking_goes_with_what_marks_it(
    thinker: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    marks = ReasoningTokens(250, 251, is_open=False)
    await ask(client, thinking_token_budget=5)
    assert thinker.seen[-1].params.thinking_token_budget == 5
    assert thinker.seen[-1].params.reasoning == marks
    await ask(client, thinking_token_budget=-1)
    assert thinker.seen[-1].params.thinking_token_budget is None
    for prompts, are_open in ((["a", "b<think>\n"], [False, True]), (["a"], [False])):
        body = {"prompt": prompts, "thinking_token_budget": 0}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        seen = [request.params.reasoning for request in thinker.seen[-len(prompts) :]]
        assert [marked is not None and marked.is_open for marked in seen] == are_open
    body = {"prompt": "a", "thinking_token_budget": 0, "guided_regex": "a"}
    error = error_of(await client.post("/v1/completions", json=body), 400)
    assert error["param"] == "thinking_token_budget"


@pytest.mark.parametrize("is_marked", [True, False])
async def test_anthropics_budget_bounds_the_thinking_that_is_marked(
    is_marked: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MIN_THINKING_TOKENS", 1)  # the context is small
    model: ModelThatWrites = request.getfixturevalue("thinker" if is_marked else "model")
    body: Json = {"model": "alias", "messages": HELLO, "max_tokens": 20}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 7}}
    async with client_for(model) as client:
        for more, expected in (({}, None), (thinking, 7 if is_marked else None)):
            assert (await client.post("/v1/messages", json={**body, **more})).status_code == 200
            assert model.seen[-1].params.thinking_token_budget == expected


async def test_no_grammar_waits_without_markers_that_are_tokens_or_reasoning(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    await ask(client, tools=None, guided_regex="a")
    assert model.seen[-1].params.reasoning is None
