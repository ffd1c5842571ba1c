"""Anthropic's Messages API over HTTP: what its clients send, and what they read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import InvalidRequestError, OverloadedError
from lora_serve.server.app import create_app
from lora_serve.server.http.drain import Drain
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import ByteTokenizer
from tests.server.clients import client_for, error_of, eventually, serving
from tests.server.openai.test_chat_parts import CALLS, QWEN, ZURICH, ModelThatWrites

URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
BODY = {"model": "base/model", "messages": HELLO, "max_tokens": 400}
TOOLS = [
    {
        "name": "get_weather",
        "description": "Of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"name": "now", "input_schema": {"type": "object"}},
]

Json = dict[str, Any]


@pytest.fixture
def model() -> ModelThatWrites:
    engine = ModelThatWrites()
    engine.tokenizer.chat_template = QWEN
    return engine


@pytest.fixture
async def api(model: ModelThatWrites) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(model) as client:
        yield client


async def ask(client: httpx.AsyncClient, **fields: object) -> Json:
    response = await client.post(URL, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **fields: object) -> list[Json]:
    response = await client.post(URL, json={**BODY, "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def events(text: str) -> list[Json]:
    """The events of a stream, each under the name that is its type."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def whole_object(text: str) -> Json:
    """An input; nothing of one that was cut off."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}


def put_together(told: list[Json]) -> Json:
    """The message that a client makes of a stream, which keeps to the order of events."""
    assert [event["type"] for event in told[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    message = told[0]["message"]
    assert message["content"] == []
    texts: list[str] = []
    is_open = False
    for event in told[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts, is_open = [], True
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = whole_object("".join(texts))
            else:
                block[block["type"]] = "".join(texts)
            continue
        delta = event["delta"]
        kind = delta["type"]
        if kind == "signature_delta":
            block["signature"] = delta["signature"]
        else:
            field = {"input_json_delta": "partial_json"}.get(kind, kind.removesuffix("_delta"))
            texts.append(delta[field])
    return {**message, **told[-2]["delta"], "usage": told[-2]["usage"]}


async def test_a_message_is_answered(api: httpx.AsyncClient, model: ModelThatWrites) -> None:
    model.text = "Hello."
    answer = await ask(api)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "base/model",
        "content": [{"type": "text", "text": "Hello.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 19,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
        },
        "system_fingerprint": "ab" * 6,
    }


ANSWERS = [
    "Hello.",
    "",
    f"Let me see.\n{CALLS}",
    f"<think>\nhm\n</think>\n\nLet me see.\n{CALLS}",
    CALLS,
    "<think>\nno end",
    f"{CALLS}\nDone.",
    CALLS[:60],
]


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"max_tokens": 30}])
async def test_a_stream_tells_the_same(
    api: httpx.AsyncClient, model: ModelThatWrites, text: str, fields: Json
) -> None:
    model.text = text
    api.headers["X-Request-Id"] = "one"
    together = put_together(await stream(api, **fields))
    whole = await ask(api, **fields)
    cached = whole["usage"].pop("cache_read_input_tokens")  # by the stream
    assert together["usage"].pop("cache_read_input_tokens") == 0
    whole["usage"]["input_tokens"] += cached
    assert together == whole


async def test_thinking_text_and_calls_are_blocks(
    api: httpx.AsyncClient, model: ModelThatWrites
) -> None:
    model.text = f"<think>\nhm\n</think>\n\nLet me see.\n{CALLS}"
    answer = await ask(api, tools=TOOLS)
    assert answer["stop_reason"] == "tool_use"
    thinking, text, weather, now = answer["content"]
    assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "hm")
    assert len(thinking["signature"]) == 64
    assert (text["type"], text["text"]) == ("text", "Let me see.")
    assert (weather["name"], weather["input"]) == ("get_weather", json.loads(ZURICH))
    assert (now["type"], now["name"], now["input"]) == ("tool_use", "now", {})
    assert weather["id"] != now["id"]


async def test_why_it_ended(api: httpx.AsyncClient, model: ModelThatWrites) -> None:
    model.text = CALLS
    assert (await ask(api, tools=TOOLS, max_tokens=60))["stop_reason"] == "max_tokens"
    assert (await ask(api, tools=TOOLS))["stop_reason"] == "tool_use"
    assert (await ask(api))["stop_reason"] == "end_turn", "without tools they are text"


async def test_a_stop_sequence_is_named(client: httpx.AsyncClient) -> None:
    answer = await ask(client, stop_sequences=["hi", "zzz"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "hi")
    assert answer["content"][0]["text"] == "You said: user\n"
    assert put_together(await stream(client, stop_sequences=["hi"]))["stop_sequence"] == "hi"


async def test_a_forced_call_is_a_block(api: httpx.AsyncClient, model: ModelThatWrites) -> None:
    model.text = ZURICH
    answer = await ask(api, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"})
    assert answer["stop_reason"] == "tool_use"
    assert [block["input"] for block in answer["content"]] == [json.loads(ZURICH)]
    model.text = f'[{{"name": "get_weather", "parameters": {ZURICH}}}]'
    answer = await ask(
        api, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert [block["input"] for block in answer["content"]] == [json.loads(ZURICH)]
    assert model.seen[-1].params.structured_outputs is not None


async def test_numbers_of_an_input_keep_their_digits(
    api: httpx.AsyncClient, model: ModelThatWrites
) -> None:
    number = 123456789012345678901234567890
    call = {"name": "now", "arguments": {"n": number}}
    model.text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    assert (await ask(api, tools=TOOLS))["content"][0]["input"] == {"n": number}


async def test_hidden_thinking_is_left_out(api: httpx.AsyncClient, model: ModelThatWrites) -> None:
    model.text = "<think>\nhm\n</think>\n\nYes."
    answer = await ask(api, thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in answer["content"]] == ["text"]


async def test_cached_tokens_are_counted_apart(client: httpx.AsyncClient) -> None:
    long = [{"role": "user", "content": "a prompt that is longer than a block"}]
    first = (await ask(client, messages=long))["usage"]
    again = (await ask(client, messages=long))["usage"]
    assert first["cache_read_input_tokens"] == 0 < again["cache_read_input_tokens"]
    assert again["input_tokens"] + again["cache_read_input_tokens"] == first["input_tokens"]
    told = await stream(client, messages=long)
    start, delta = told[0]["message"]["usage"], told[-2]["usage"]
    assert start["cache_read_input_tokens"] == again["cache_read_input_tokens"]
    assert {**start, "output_tokens": again["output_tokens"]} == delta


async def test_counted_tokens_are_those_of_the_prompt(client: httpx.AsyncClient) -> None:
    fields = {"messages": HELLO, "system": "be brief", "model": "alias"}
    response = await client.post(COUNT, json=fields)
    assert response.json() == {
        "input_tokens": (await ask(client, **fields))["usage"]["input_tokens"]
    }
    error_of(await client.post(COUNT, json={**fields, "model": "nobody"}), 404)


def text_block(text: str) -> Json:
    return {"type": "text", "text": text}


# A body of Anthropic's, and the same as a chat's.
SAME: list[tuple[Json, Json]] = [
    ({}, {}),
    ({"system": "be brief"}, {"messages": [{"role": "system", "content": "be brief"}, *HELLO]}),
    (
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=9f;"},
                {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief"},
            ]
        },
        {"messages": [{"role": "system", "content": "You are\nbrief"}, *HELLO]},
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": "I am"}]},
        {
            "messages": [*HELLO, {"role": "assistant", "content": "I am"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    (
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "Let me see."},
                        {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": "ü"}},
                        {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "noon"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "t2",
                            "is_error": True,
                            "content": [text_block("no"), text_block("clock")],
                        },
                        {"type": "text", "text": "and"},
                        {"type": "text", "text": "now?"},
                    ],
                },
            ],
            "tools": TOOLS,
        },
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": "Let me see.",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "t1", "function": {"name": "now", "arguments": '{"a": "ü"}'}},
                        {"id": "t2", "function": {"name": "now", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "content": "noon", "tool_call_id": "t1"},
                {"role": "tool", "content": "Error: no\nclock", "tool_call_id": "t2"},
                {"role": "user", "content": "and\nnow?"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "parameters": tool["input_schema"],
                        **({"description": tool["description"]} if "description" in tool else {}),
                    },
                }
                for tool in TOOLS
            ],
        },
    ),
    (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        {
            "chat_template_kwargs": {
                "enable_thinking": False,
                "thinking": False,
                "reasoning_effort": "low",
            }
        },
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
        {
            "chat_template_kwargs": {
                "enable_thinking": True,
                "thinking": True,
                "thinking_budget": 1024,
            },
            "max_tokens": 2000,
        },
    ),
    (
        {
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 7,
            "stop_sequences": ["x", "y"],
            "cache_salt": "mine",
            "seed": 3,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
        {
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 7,
            "stop": ["x", "y"],
            "cache_salt": "mine",
            "seed": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object"}, "strict": True},
            },
        },
    ),
]


class DigestTokenizer(ByteTokenizer):
    """Writes a digest of all that a template gets."""

    chat_template = QWEN

    def render_chat(self, messages: object, **given: object) -> str:
        told = json.dumps([messages, given], default=str)
        return hashlib.sha256(told.encode()).hexdigest()


@pytest.mark.parametrize(("sent", "chat"), SAME)
async def test_the_engine_is_asked_the_same_as_by_a_chat(sent: Json, chat: Json) -> None:
    """So the answers have the same bits."""
    engine = FakeEngine(tokenizer=DigestTokenizer(), max_model_len=4096)
    async with client_for(engine) as client:
        for url, fields in ((URL, sent), (CHAT, chat)):
            response = await client.post(url, json={**BODY, "seed": 1, **fields})
            assert response.status_code == 200, response.text
    first, second = engine.seen
    assert first.prompt == second.prompt
    assert first.params == second.params
    assert first.cache_salt == second.cache_salt


def with_block(role: str = "user", **block: object) -> Json:
    return {"messages": [{"role": role, "content": [block]}, *HELLO]}


def of_tool(**tool: object) -> Json:
    return {"tools": [{"name": "now", "input_schema": {"type": "object"}, **tool}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"max_tokens": -1}, ["max_tokens", "-1"]),
        ({"model": None}, ["model"]),
        ({"temperature": 1.5}, ["temperature", "1.5"]),
        ({"messages": []}, ["messages"]),
        ({"n": 2}, ["unknown field `n`"]),
        ({"mcp_servers": [{"url": "x"}]}, ["mcp_servers", "not supported"]),
        ({"stop_sequences": ["x"] * 17}, ["stop_sequences"]),
        ({"thinking": {"type": "enabled"}}, ["thinking", "budget_tokens"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, ["7", "1024"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["1024", "max_tokens 400"]),
        ({"tool_choice": {"type": "tool"}}, ["tool_choice", "name"]),
        ({"tool_choice": {"type": "any"}}, ["tool_choice", "tools"]),
        (of_tool(type="web_search_20250305"), ["tools[0]", "web_search_20250305", "leave it out"]),
        (of_tool(name="a b"), ["tools[0].name"]),
        ({"tools": [TOOLS[1], TOOLS[1]]}, ["tools", "two tools named now"]),
        (
            with_block(type="image", source={"type": "url"}, title="x"),
            ["messages[0].content[0]: is a block of type 'image'", "reads text alone"],
        ),
        (with_block(type="document", source={}), ["content[0]", "'document'"]),
        (
            with_block(type="tool_result", tool_use_id="t", content=[{"type": "image"}]),
            ["messages[0].content[0].content[0]", "'image'", "only text"],
        ),
        (with_block(type="text"), ["messages[0].content[0]", "no text"]),
        (with_block(type="text", text="x", name="y"), ["which has no name"]),
        (with_block(type="tool_use", id="t", name="now", input={}), ["role user", "tool_use"]),
        (with_block("assistant", type="tool_use", id="t", name="now"), ["no input"]),
        ({"messages": [*HELLO, {"role": "assistant", "content": " "}]}, ["continued"]),
        ({"output_config": {"format": {"type": "yaml"}}}, ["output_config.format"]),
        ({"system": 5}, ["system: must be a text or a list of blocks, got 5"]),
        (
            {"messages": [{"role": "user", "content": None}]},
            ["messages[0].content: must be a text or a list of blocks, got null"],
        ),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, fields: Json, words: list[str]
) -> None:
    body = {key: value for key, value in {**BODY, **fields}.items() if value is not None}
    error = error_of(await client.post(URL, json=body), 400)
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in str(error["message"])


async def test_fields_have_the_names_that_the_client_knows(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        engine.error = InvalidRequestError("response_format: no such grammar", "response_format")
        error = error_of(await client.post(URL, json=BODY), 400)
        assert error["message"] == "output_config.format: no such grammar"


@pytest.mark.parametrize("path", [URL, COUNT])
async def test_every_refusal_has_anthropics_shape(engine: FakeEngine, path: str) -> None:
    drain = Drain()
    config = ServerConfig(api_key=("key",), max_body_bytes=500)
    transport = httpx.ASGITransport(create_app(engine, config, drain))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def kind(status: int, method: str = "POST", **changes: object) -> object:
            body = {"messages": HELLO}
            body |= {"max_tokens": 9} if path == URL else {}
            body |= {"model": changes.pop("model", "base/model")}
            asked = {"json": body, "headers": {"x-api-key": "key"}, **changes}
            answer = await client.request(method, f"{path}?beta=true", **asked)
            return error_of(answer, status)["type"]

        assert await kind(401, headers={}) == "authentication_error"
        assert await kind(403, headers={"Host": "elsewhere"}) == "permission_error"
        assert await kind(405, "GET") == "invalid_request_error"
        assert await kind(400, json={}) == "invalid_request_error"
        assert await kind(404, model="nobody") == "not_found_error"
        assert await kind(413, json={"a": "a" * 999}) == "request_too_large"
        engine.error = ZeroDivisionError("a bug")
        if path == URL:
            assert await kind(500) == "api_error"
            engine.error = OverloadedError("the queue is full")
            assert await kind(503) == "overloaded_error"
        drain.begin()
        assert await kind(503) == "overloaded_error"
    async with client_for(engine) as client:
        error_of(await client.get(f"{URL}/batches"), 404)
        assert set((await client.get("/v1/messagesx")).json()) == {"error"}


async def test_both_ways_to_send_a_key_are_taken(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(api_key=("user", "other"))) as client:

        async def status(**headers: str) -> int:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await client.post(URL, json=BODY, headers=sent)).status_code

        assert await status(x_api_key="user") == 200
        assert await status(authorization="Bearer user") == 200
        assert await status(x_api_key="user", authorization="Bearer unused") == 200
        assert await status(x_api_key="unused", authorization="Bearer user") == 200
        assert await status(x_api_key="unused") == 401
        assert await status(x_api_key="") == 401
        assert await status(x_api_key="Bearer user") == 401
        assert await status(x_api_key="user", authorization="Bearer other") == 200
    salts = [request.cache_salt for request in engine.seen]
    assert len(set(salts[:4])) == 1
    assert salts[4] != salts[0], "of two known keys the Bearer one counts"


async def test_an_error_in_the_middle_of_a_stream_is_an_event_and_the_end(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.fail_after = 2
    told = await stream(client)
    assert told[-1]["type"] == "error"
    assert told[-1]["error"]["type"] == "overloaded_error"
    assert "engine process has died" in told[-1]["error"]["message"]
    assert told[-1]["request_id"]
    assert not any(event["type"] == "message_stop" for event in told)


async def test_a_client_that_leaves_ends_its_answer(engine: FakeEngine) -> None:
    engine.gate.clear()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(URL, json={**BODY, "stream": True}, timeout=0.2)
        await eventually(lambda: engine.ended_early)
    assert not engine.growing


class SystemFirstTokenizer(ByteTokenizer):
    """Writes as Qwen's template does, which takes a system message first or not at all."""

    def render_chat(self, messages: Sequence[Mapping[str, object]], **given: object) -> str:
        if any(message["role"] == "system" for message in messages[1:]):
            raise InvalidRequestError("the system message must be the first", "messages")
        return super().render_chat(messages, **given)


LATE = [*HELLO, {"role": "system", "content": "be brief"}, {"role": "user", "content": "ho"}]


@pytest.mark.parametrize(
    ("tokenizer", "role"), [(ByteTokenizer(), "system"), (SystemFirstTokenizer(), "user")]
)
async def test_a_late_system_message_is_told_as_the_template_allows(
    tokenizer: ByteTokenizer, role: str
) -> None:
    engine = FakeEngine(tokenizer=tokenizer)
    async with client_for(engine) as client:
        answer = await ask(client, messages=LATE)
    assert f"user\nhi{role}\nbe briefuser\nho" in answer["content"][0]["text"]


async def test_what_claude_code_sends_is_taken(api: httpx.AsyncClient) -> None:
    cached = {"type": "ephemeral", "ttl": "1h"}
    text = {"type": "text", "text": "hi", "cache_control": cached}
    body = {
        "model": "base/model",
        "max_tokens": 400,
        "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": cached}],
        "messages": [{"role": "user", "content": [text, text]}],
        "tools": [
            {**tool, "cache_control": cached, "eager_input_streaming": True, "strict": False}
            for tool in TOOLS
        ],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    response = await api.post(f"{URL}?beta=true", json=body, headers=headers)
    assert put_together(events(response.text))["stop_reason"] == "end_turn"
    for name in ("max_tokens", "metadata", "stream", "temperature"):
        del body[name]
    counted = await api.post(f"{COUNT}?beta=true", json=body, headers=headers)
    assert counted.json()["input_tokens"] > 0


@pytest.mark.parametrize("num_told", [0, 2])
async def test_an_answer_that_a_call_aborts_is_an_error(
    engine: FakeEngine, client: httpx.AsyncClient, num_told: int
) -> None:
    engine.abort_after = num_told
    error = error_of(await client.post(URL, json=BODY), 503)
    assert error["type"] == "api_error"
    assert "aborted" in str(error["message"])
    told = await stream(client)
    assert told[-1]["type"] == "error"
    assert told[-1]["error"] == error
    assert not any(event["type"] in ("message_delta", "message_stop") for event in told)
