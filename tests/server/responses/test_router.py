"""/v1/responses with the client that people really use, whose types say what an answer must be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lora_serve.config import ServerConfig
from lora_serve.errors import EngineDeadError, InvalidRequestError, OverloadedError
from lora_serve.server.app import create_app
from lora_serve.server.http.drain import Drain
from lora_serve.server.responses.items import TextItem
from lora_serve.server.responses.protocol import ResponseBody
from lora_serve.server.responses.store import MAX_RUNNING
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of, eventually, serving
from tests.server.openai.test_chat_parts import CALLS, QWEN, ZURICH, ModelThatWrites
from tests.server.openai.test_chat_parts import TOOLS as CHAT_TOOLS

URL = "/v1/responses"
TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
ANSWER = "You said: user\nhiassistant\n #0"

Json = dict[str, Any]


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
    """A response, which must be what the client's types say."""
    response = await client.post(URL, json={"input": "hi", **fields})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


async def stream(client: httpx.AsyncClient, **fields: object) -> list[Json]:
    """The events of a stream, numbered and named, and each as the client's types say."""
    text = (await client.post(URL, json={"input": "hi", "stream": True, **fields})).text
    blocks = text.removesuffix("\n\n").split("\n\n")
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        found.append(event)
    return found


def stable(response: Json) -> Json:
    """A response without what no two have in common."""
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "")
    return {**json.loads(text), "created_at": 0, "completed_at": 0}


async def test_a_text_is_answered_as_a_chat_is(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        answer = await ask(client, **LOGPROBS, seed=1)
        chat = await client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "hi"}],
                "logprobs": True,
                "top_logprobs": 2,
                "seed": 1,
            },
        )
    (item,) = answer["output"]
    (part,) = item["content"]
    (choice,) = chat.json()["choices"]
    assert part["text"] == choice["message"]["content"] == ANSWER
    assert part["logprobs"] == choice["logprobs"]["content"]
    assert answer["status"] == item["status"] == "completed"
    assert answer["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == chat.json()["usage"]["completion_tokens"]
    assert answer["system_fingerprint"] == chat.json()["system_fingerprint"]


CONVERSATION = [
    {"role": "user", "content": [{"type": "input_text", "text": "How warm is it?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "hm"}
    ]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
        {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    ]},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": ZURICH},
    {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
    {"type": "function_call_output", "call_id": "c1", "output": "20"},
    {"type": "function_call_output", "call_id": "c2", "output": [
        {"type": "input_text", "text": "noon"}
    ]},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "So?"},
]  # fmt: skip
SAME_CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "How warm is it?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "c1", "function": {"name": "get_weather", "arguments": ZURICH}},
            {"id": "c2", "function": {"name": "now", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "20"},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "So?"},
]


async def test_items_are_the_messages_of_the_same_chat(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of what a template sees is equal, and all that is asked of the engine."""
    rendered: list[tuple[object, object]] = []
    render = engine.tokenizer.render_chat

    def noting_render(messages: object, **arguments: object) -> str:
        rendered.append((messages, arguments))
        return render(messages, **arguments)

    monkeypatch.setattr(engine.tokenizer, "render_chat", noting_render)
    settings = {"temperature": 0.5, "top_k": 3, "seed": 7, "stop": ["§"], "cache_salt": "s"}
    schema = {"type": "object", "properties": {}}
    async with client_for(engine) as client:
        await ask(
            client,
            input=CONVERSATION,
            instructions="Be kind.",
            tools=TOOLS,
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
            max_output_tokens=40,
            **LOGPROBS,
            **settings,
        )
        chat = {
            "messages": SAME_CHAT,
            "tools": CHAT_TOOLS,
            "reasoning_effort": "low",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema, "strict": True},
            },
            "max_completion_tokens": 40,
            "logprobs": True,
            "top_logprobs": 2,
            **settings,
        }
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert rendered[0] == rendered[1]
    of_response, of_chat = engine.seen
    assert of_response.prompt == of_chat.prompt
    assert of_response.params == of_chat.params
    assert of_response.cache_salt == of_chat.cache_salt


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_reasoning_text_and_calls_are_items(
    model: ModelThatWrites, client: httpx.AsyncClient, is_streamed: bool
) -> None:
    model.text = "<think>hm</think>Let me see.\n" + CALLS
    fields = {"tools": TOOLS, "max_output_tokens": 400, **LOGPROBS}
    if is_streamed:
        answer = (await stream(client, **fields))[-1]["response"]
    else:
        answer = await ask(client, **fields)
    thoughts, message, *calls = answer["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}]
    (part,) = message["content"]
    assert part["text"] == "Let me see."
    assert "".join(entry["token"] for entry in part["logprobs"]) == "Let me see."
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("get_weather", ZURICH),
        ("now", "{}"),
    ]
    assert len({item["id"] for item in answer["output"]}) == 4
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")


async def test_a_stream_says_what_the_whole_answer_says(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = "<think>hm</think>Let me see.\n" + CALLS
    fields = {"tools": TOOLS, "max_output_tokens": 400, **LOGPROBS}
    await ask(client, **fields)  # so that both find the same in the cache
    whole = await ask(client, **fields)
    events = await stream(client, **fields)
    assert stable(events[-1]["response"]) == stable(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


async def test_each_item_is_begun_told_in_pieces_and_ended(
    model: ModelThatWrites, client: httpx.AsyncClient
) -> None:
    model.text = "<think>hm</think>Hi" + CALLS
    events = await stream(client, tools=TOOLS, max_output_tokens=400)
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if kinds[i - 1 : i] != [kind]]
    item = ["output_item.added", "content_part.added"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert once == [
        *("created", "in_progress", *item, "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", *item, "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", *call, "output_item.done"),
        *(*call, "output_item.done", "completed"),
    ]
    for index in range(4):
        mine = [event for event in events if event.get("output_index") == index]
        item_id = mine[0]["item"]["id"]
        assert {event.get("item_id", item_id) for event in mine} == {item_id}
        assert mine[0]["item"]["status"] == "in_progress"
        assert mine[-1]["item"]["status"] == "completed"
        told = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        done = next(e for e in mine if e["type"].endswith(("text.done", "arguments.done")))
        assert told == done.get("text", done.get("arguments"))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_that_is_cut_off_is_incomplete(
    client: httpx.AsyncClient, model: ModelThatWrites, is_streamed: bool
) -> None:
    model.text = "Hello"
    if is_streamed:
        last = (await stream(client, max_output_tokens=2))[-1]
        assert last["type"] == "response.incomplete"
        answer = last["response"]
    else:
        answer = await ask(client, max_output_tokens=2)
    assert answer["status"] == answer["output"][-1]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["text"] == "He"


@pytest.mark.parametrize("how", ["whole", "streamed", "background"])
async def test_an_answer_that_a_call_aborts_is_cancelled_and_keeps_what_it_had(
    client: httpx.AsyncClient, model: ModelThatWrites, how: str
) -> None:
    model.text, model.abort_after = "Hello", 2
    if how == "streamed":
        last = (await stream(client))[-1]
        assert last["type"] == "response.incomplete"
        answer = last["response"]
    elif how == "whole":
        answer = await ask(client)
    else:
        path = f"{URL}/{(await ask(client, background=True))['id']}"
        await asyncio.sleep(0.05)
        answer = (await client.get(path)).json()
    assert answer["status"] == "cancelled"
    assert answer["completed_at"] is None
    assert answer["incomplete_details"] is None
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == "He"
    again = {"input": "ho", "previous_response_id": answer["id"]}
    assert "is cancelled" in error_of(await client.post(URL, json=again), 400)["message"]


async def test_an_answer_without_anything_has_an_empty_message(
    client: httpx.AsyncClient, model: ModelThatWrites
) -> None:
    """Clients that look for the last message find one."""
    model.text = ""
    (item,) = (await ask(client))["output"]
    assert item["content"][0]["text"] == ""


async def test_an_engine_that_dies_in_mid_stream_is_told_as_a_failure(engine: FakeEngine) -> None:
    engine.fail_after = 2
    async with client_for(engine) as client:
        events = await stream(client)
        last = events[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert "engine process has died" in last["response"]["error"]["message"]
        gone = await client.get(f"{URL}/{last['response']['id']}")
    error_of(gone, 404)


async def test_what_was_asked_for_is_told_again(client: httpx.AsyncClient) -> None:
    told = {
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "user": "me",
        "temperature": 0.5,
        "top_p": 0.5,
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "truncation": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "tool_choice": {"type": "function", "name": "now"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    answer = await ask(client, **told, tools=TOOLS)
    assert {name: answer[name] for name in told} == told
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather", "now"]


async def test_fields_that_are_null_are_not_given(client: httpx.AsyncClient) -> None:
    nulls = dict.fromkeys(ResponseBody.model_fields.keys() - {"input", "model"})
    plain, same = await ask(client), await ask(client, **nulls)
    assert same["tools"] == []
    assert [item["content"] for item in same["output"]] == [i["content"] for i in plain["output"]]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "now"}]}],
    ids=["required", "allowed"],
)  # fmt: skip
async def test_a_call_can_be_forced(
    model: ModelThatWrites, client: httpx.AsyncClient, choice: object
) -> None:
    model.text = '[{"name": "now", "parameters": {}}]'
    answer = await ask(client, tools=TOOLS, tool_choice=choice, **LOGPROBS)
    assert [(item["type"], item["name"]) for item in answer["output"]] == [("function_call", "now")]
    assert answer["tool_choice"] == choice


WRONG = [
    ({"input": 7}, "input", "a text or a list of items"),
    ({"input": []}, "input", "from 1 to"),
    ({"input": [{"type": "web_search_call"}]}, "input", "'web_search_call'"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "previous_response_id"),
    ({"input": [{"role": "wizard", "content": ""}]}, "input", "role"),
    ({"input": ""}, "input", "is empty"),
    ({"top_logprobs": -2}, "top_logprobs", "got -2"),  # though none are shown
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
    ({"input": [{"role": "user", "content": "", "colour": 1}]}, "input", "colour"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
        "input",
        "JSON object",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "call_id"),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        "input",
        "encrypted_content",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": TOOLS[:1] * 2}, "tools", "two tools named"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", "no tools of its own"),
    ({"tool_choice": {"type": "function", "name": "fly"}, "tools": TOOLS}, "tool_choice", "fly"),
    ({"include": ["reasoning.encrypted_content"]}, "include[0]", "encrypted_content"),
    ({"conversation": "c"}, "conversation", "not supported"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "json_object, json_schema; what else"),
    ({"text": {"format": {"type": "structural_tag"}}}, "text.format", "by structured_outputs"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format",
        "must have an object `schema`",
    ),
    ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens must be in"),
    ({"max_output_tokens": 600}, "max_output_tokens", "max_output_tokens"),
    ({"input": "x" * 600}, None, "context holds 512"),
    ({"temperature": 3}, "temperature", "temperature must be in"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not found"),
    ({"background": True, "store": False}, "background", "`store` is true"),
    ({"background": True, "stream": True}, "background", "exclude"),
    ({"colour": 1}, "colour", "unknown field"),
]


async def test_a_response_is_found_by_an_id_with_slashes(client: httpx.AsyncClient) -> None:
    await ask(client, request_id="jobs/7")
    for name in ("resp_jobs/7", "resp_jobs%2F7"):
        assert (await client.get(f"{URL}/{name}")).json()["id"] == "resp_jobs/7"
        items = (await client.get(f"{URL}/{name}/input_items")).json()
        assert len(items["data"]) == 1
    assert (await client.delete(f"{URL}/resp_jobs/7")).status_code == 200


async def test_a_shutdown_waits_for_what_runs_in_the_background(engine: FakeEngine) -> None:
    drain = Drain()
    app = create_app(engine, ServerConfig(), drain=drain)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        engine.gate.clear()
        await ask(client, background=True)
        assert drain.num_active == 1
        drain.begin()
        engine.gate.set()
        await eventually(lambda: drain.num_active == 0)


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
async def test_what_is_wrong_is_named_as_the_body_names_it(
    client: httpx.AsyncClient, fields: Json, param: str | None, message: str
) -> None:
    response = await client.post(URL, json={"input": "hi", **fields})
    error = error_of(response, 404 if "previous_response_id" in fields else 400)
    assert message in error["message"]
    assert param is None or error["param"] == param


async def test_a_conversation_goes_on_without_being_sent_again(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        first = await ask(client, instructions="Be kind.")
        second = await ask(client, input="ho", previous_response_id=first["id"])
        again = await ask(
            client,
            input=[
                {"role": "user", "content": "hi"},
                *first["output"],
                {"role": "user", "content": "ho"},
            ],
        )
    assert engine.seen[1].prompt == engine.seen[2].prompt
    assert second["output"][0]["content"] == again["output"][0]["content"]
    assert second["previous_response_id"] == first["id"]


async def test_a_response_is_kept_until_it_is_deleted(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        answer = await ask(client)
        streamed = (await stream(client))[-1]["response"]
        unkept = await ask(client, store=False)
        for each in (answer, streamed):
            assert (await client.get(f"{URL}/{each['id']}")).json() == each
        error_of(await client.get(f"{URL}/{unkept['id']}"), 404)
        deleted = await client.delete(f"{URL}/{answer['id']}")
        assert deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}
        error_of(await client.get(f"{URL}/{answer['id']}"), 404)
        error_of(await client.delete(f"{URL}/{answer['id']}"), 404)


async def test_another_keys_response_is_not_found(engine: FakeEngine) -> None:
    def key(name: str) -> dict[str, dict[str, str]]:
        return {"headers": {"Authorization": f"Bearer {name}"}}

    async with client_for(engine, ServerConfig(api_key=("mine", "theirs"))) as client:
        response_id = (await client.post(URL, json={"input": "hi"}, **key("mine"))).json()["id"]
        path = f"{URL}/{response_id}"
        for method, url in (
            ("GET", path),
            ("DELETE", path),
            ("POST", f"{path}/cancel"),
            ("GET", f"{path}/input_items"),
        ):
            error_of(await client.request(method, url, **key("theirs")), 404)
        body = {"input": "hi", "previous_response_id": response_id}
        error_of(await client.post(URL, json=body, **key("theirs")), 404)
        assert (await client.get(path, **key("mine"))).status_code == 200


async def test_a_server_that_keeps_none_says_so(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(max_stored_responses=0)) as client:
        answer = await ask(client)
        assert answer["store"] is False
        error_of(await client.get(f"{URL}/{answer['id']}"), 404)
        for fields in ({"previous_response_id": answer["id"]}, {"background": True}):
            error = error_of(await client.post(URL, json={"input": "hi", **fields}), 400)
            assert "--max-stored-responses" in error["message"]


async def test_a_response_can_be_answered_in_the_background(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        engine.gate.clear()
        queued = await ask(client, background=True)
        assert (queued["status"], queued["output"]) == ("queued", [])
        path = f"{URL}/{queued['id']}"
        running = (await client.get(path)).json()
        assert running["status"] == "in_progress"
        assert (await client.get("/load")).json() == {"server_load": 1}
        refused = {"input": "ho", "previous_response_id": queued["id"]}
        assert "in_progress" in error_of(await client.post(URL, json=refused), 400)["message"]
        engine.gate.set()
        await eventually(lambda: not engine.growing)
        await asyncio.sleep(0.05)
        done = (await client.get(path)).json()
        Response.model_validate(done)
        assert done["status"] == "completed"
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert done["output"][0]["content"][0]["text"] == ANSWER
        assert (await client.post(f"{path}/cancel")).json() == done
        await ask(client, previous_response_id=queued["id"])


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_what_runs_in_the_background_can_be_ended(engine: FakeEngine, how: str) -> None:
    async with client_for(engine) as client:
        engine.gate.clear()
        path = f"{URL}/{(await ask(client, background=True))['id']}"
        await eventually(lambda: engine.growing)
        if how == "cancel":
            assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
            assert (await client.get(path)).json()["status"] == "cancelled"
        else:
            await client.delete(path)
            error_of(await client.get(path), 404)
        await eventually(lambda: not engine.growing)
        assert len(engine.ended_early) == 1


async def test_what_runs_in_the_background_is_bounded(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        engine.gate.clear()
        for _ in range(MAX_RUNNING):
            await ask(client, background=True)
        refused = await client.post(URL, json={"input": "hi", "background": True})
        assert "background" in error_of(refused, 503)["message"]
        assert (await client.post(f"{URL}/x/cancel")).status_code == 404
        engine.gate.set()
        await eventually(lambda: not engine.growing)
        await asyncio.sleep(0.05)


async def test_a_failure_in_the_background_is_told_when_it_is_asked_for(
    engine: FakeEngine,
) -> None:
    engine.error = ZeroDivisionError("a bug")
    async with client_for(engine) as client:
        path = f"{URL}/{(await ask(client, background=True))['id']}"
        await asyncio.sleep(0.05)
        failed = (await client.get(path)).json()
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert "a bug" not in failed["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (EngineDeadError("it died"), "server_error", "it died"),
        (OverloadedError("too much"), "rate_limit_exceeded", "too much"),
        (InvalidRequestError("max_tokens 9", "max_tokens"), "invalid_prompt", "max_output_tokens"),
    ],
)
async def test_a_failure_in_the_background_says_what_a_foreground_one_says(
    engine: FakeEngine, error: Exception, code: str, message: str
) -> None:
    engine.error = error
    async with client_for(engine) as client:
        path = f"{URL}/{(await ask(client, background=True))['id']}"
        await asyncio.sleep(0.05)
        failed = (await client.get(path)).json()
    assert failed["error"]["code"] == code
    assert message in failed["error"]["message"]


async def test_the_id_is_the_clients_and_that_of_one_that_runs_is_not_taken_again(
    engine: FakeEngine,
) -> None:
    async with client_for(engine) as client:
        engine.gate.clear()
        assert (await ask(client, request_id="mine", background=True))["id"] == "resp_mine"
        again = await client.post(URL, json={"input": "hi", "request_id": "mine"})
        assert error_of(again, 400)["param"] == "request_id"
        await client.post(f"{URL}/resp_mine/cancel")
        engine.gate.set()
        assert (await ask(client, request_id="mine"))["status"] == "completed"
        assert (await client.get(f"{URL}/resp_mine")).json()["status"] == "completed"


async def test_one_that_was_waited_for_cannot_be_cancelled(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        answer = await ask(client)
        error = error_of(await client.post(f"{URL}/{answer['id']}/cancel"), 400)
        error_of(await client.get(f"{URL}/{answer['id']}?stream=true"), 400)
    assert error["message"].startswith("Cannot cancel a synchronous response.")


async def test_the_conversation_before_an_answer_is_listed(engine: FakeEngine) -> None:
    async with (
        serving(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as api,
    ):
        first = await api.responses.create(model="base/model", input=CONVERSATION)
        listed = api.responses.input_items.list
        items = [item async for item in listed(first.id, order="asc", limit=2)]
        newest = await listed(first.id, limit=1)
        with pytest.raises(openai.BadRequestError, match="limit must be in"):
            await listed(first.id, limit=0)
    assert [item.type for item in items] == [
        *("message", "reasoning", "message", "function_call", "function_call"),
        *("function_call_output", "function_call_output", "message", "message"),
    ]
    assert newest.data[0].content[0].text == "So?"
    assert newest.has_more


async def test_the_oldest_turns_are_left_out_where_that_is_asked_for(engine: FakeEngine) -> None:
    """A context of 512 tokens holds two of these turns, and the system's message."""
    turns = [
        {"role": role, "content": f"{number}" * 80}
        for number in range(9)
        for role in ("user", "assistant")
    ]
    body = {"input": [{"role": "system", "content": "Be kind."}, *turns], "max_output_tokens": 100}
    async with client_for(engine) as client:
        error_of(await client.post(URL, json=body), 400)
        await ask(client, **body, truncation="auto")
        prompt = engine.tokenizer.decode(engine.seen[-1].prompt.token_ids)
        too_long = {**body, "input": "x" * 600, "truncation": "auto"}
        error_of(await client.post(URL, json=too_long), 400)
    assert "Be kind." in prompt
    assert [number for number in "012345678" if number in prompt] == ["7", "8"]


async def num_kept(client: httpx.AsyncClient, response_id: str) -> int:
    """How many items are kept of a conversation, from the id of its newest."""
    listed = await client.get(f"{URL}/{response_id}/input_items?limit=1")
    return int(listed.json()["first_id"][-4:], 16) + 1


@pytest.mark.parametrize("limit", ["0", "101", "000000001" + "9" * 5000])
async def test_a_limit_of_items_that_cannot_be_read_is_refused(
    client: httpx.AsyncClient, limit: str
) -> None:
    answer = await ask(client, input="x", max_output_tokens=1)
    url = f"{URL}/{answer['id']}/input_items?limit={limit}"
    assert error_of(await client.get(url), 400)["param"] == "limit"


async def test_a_conversation_is_kept_as_it_was_cut(engine: FakeEngine) -> None:
    """A context of 512 tokens holds one turn of 300 characters."""
    async with client_for(engine) as client:
        answer = await ask(client, input="x" * 300, max_output_tokens=1)
        for _ in range(3):
            fields = {"previous_response_id": answer["id"], "truncation": "auto"}
            answer = await ask(client, input="y" * 300, max_output_tokens=1, **fields)
            assert await num_kept(client, answer["id"]) == 1


async def test_a_conversation_has_no_more_items_than_a_body() -> None:
    items = [{"role": "assistant", "content": ""}] * 4095 + [{"role": "user", "content": "a"}]
    async with client_for(FakeEngine(max_model_len=2**20)) as client:
        first = await ask(client, input=items, max_output_tokens=1)
        going_on = {"input": items, "previous_response_id": first["id"], "max_output_tokens": 1}
        error = error_of(await client.post(URL, json=going_on), 400)
        cut = await ask(client, **going_on, truncation="auto")
        assert await num_kept(client, cut["id"]) <= 4096
    assert error["param"] == "previous_response_id"
    assert "8193 items" in str(error["message"])
    assert "at most 4096" in str(error["message"])


async def test_what_cannot_fit_is_not_cut_in_a_dozen_ways(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, rendered = engine.tokenizer.render_chat, []
    monkeypatch.setattr(
        engine.tokenizer,
        "render_chat",
        lambda messages, **settings: rendered.append(messages) or render(messages, **settings),
    )
    body = {"input": [{"role": "user", "content": "a"}] * 4096, "truncation": "auto"}
    async with client_for(engine) as client:
        error_of(await client.post(URL, json={**body, "instructions": "x" * 600}), 400)
    assert len(rendered) <= 2


async def test_only_the_page_that_is_asked_for_is_described(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, ids = TextItem.described, []
    monkeypatch.setattr(
        TextItem, "described", lambda item, item_id: ids.append(item_id) or described(item, item_id)
    )
    async with client_for(engine) as client:
        answer = await ask(client, input=[{"role": "user", "content": "a"}] * 20)
        url = f"{URL}/{answer['id']}/input_items?limit=2"
        newest = (await client.get(url)).json()
        older = (await client.get(f"{url}&after={newest['last_id']}")).json()
        oldest = (await client.get(f"{url}&order=asc&after={ids[0][:-4]}0011")).json()
        for wrong in (f"{ids[0]}0", ids[0][:-4] + "0014", "", "item_", ids[0][:-4] + "1_1"):
            error_of(await client.get(f"{url}&after={wrong}"), 400)
    assert [each[-4:] for each in ids] == ["0013", "0012", "0011", "0010", "0012", "0013"]
    assert (newest["has_more"], older["has_more"], oldest["has_more"]) == (True, True, False)


async def test_openais_client_streams_calls_and_goes_on(model: ModelThatWrites) -> None:
    model.text = "<think>hm</think>" + CALLS
    async with (
        serving(model) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as api,
    ):
        async with api.responses.stream(
            model="base/model", input="hi", tools=TOOLS, max_output_tokens=400
        ) as streamed:
            final = await streamed.get_final_response()
        calls = [item for item in final.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "20"}
            for call in calls
        ]
        model.text = "It is warm."
        history = [{"role": "user", "content": "hi"}, *final.output, *results]
        answer = await api.responses.create(model="base/model", input=history)
        same = await api.responses.create(
            model="base/model", input=results, previous_response_id=final.id
        )
    assert [call.name for call in calls] == ["get_weather", "now"]
    assert answer.output_text == same.output_text == "It is warm."
    assert model.seen[1].prompt == model.seen[2].prompt


async def test_a_client_that_leaves_ends_its_stream(engine: FakeEngine) -> None:
    engine.gate.clear()
    async with serving(engine) as url, httpx.AsyncClient() as client:
        body = {"input": "hi", "stream": True}
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{url}{URL}", json=body, timeout=0.3)
        await eventually(lambda: engine.ended_early)
