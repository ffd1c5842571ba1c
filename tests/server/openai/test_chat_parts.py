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
from lora_serve.server.http.app import create_app
from lora_serve.server.openai.protocol import ChatBody
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
    """Answers every prompt with `text`."""

    text = ""

    def _text(self, request: GenerateRequest, index: int) -> tuple[str, str, str | None]:
        assert request.params.max_tokens is not None
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
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 400, **fields}
    response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **fields: object) -> list[Json]:
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 400, "stream": True, **fields}
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
    assert ChatBody(messages=[{"role": "user"}], **fields).template_kwargs == expected


async def test_a_parser_can_be_named_or_turned_off(model: ModelThatWrites) -> None:
    model.text = "<think>hm</think>" + CALLS
    config = ServerConfig(reasoning_parser="none", tool_call_parser="none")
    async with client_for(model, config) as client:
        answer = await ask(client, tools=None)
        body = {"messages": HELLO, "tools": TOOLS}
        error = error_of(await client.post(URL, json=body), 400)
    assert answer["choices"][0]["message"]["content"] == model.text
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    model.text = "[now()]"
    async with client_for(model, ServerConfig(tool_call_parser="pythonic")) as client:
        (call,) = (await ask(client))["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "now"


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
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "response_format exclude each other",
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


async def test_openais_client_calls_a_tool_and_goes_on(model: ModelThatWrites) -> None:
    model.text = "<think>hm</think>" + CALLS
    async with (
        serving(model) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as api,
    ):
        create = api.chat.completions.create
        answer = await create(model="base/model", messages=HELLO, tools=TOOLS, max_tokens=400)
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "20"}
            for call in message.tool_calls
        ]
        history = [*HELLO, message, *results]
        async with api.chat.completions.stream(
            model="base/model", messages=history, tools=TOOLS, max_tokens=400
        ) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("get_weather", ZURICH), ("now", "{}")]
    assert streamed.finish_reason == answer.choices[0].finish_reason == "tool_calls"
    again = [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls]
    assert again == calls
