"""Bodies that are small to send and large to hold, on every route."""

from __future__ import annotations

import json
import sys
import tracemalloc

import pytest

from lora_serve.server.openai.tool_fields import parse_arguments
from lora_serve.server.responses.items import CallItem
from tests.fakes.engine import FakeEngine
from tests.hostile.test_bodies import ROUTES
from tests.server.clients import client_for, error_of

BODY_BYTES = 2**20
MAX_PEAK = 12 * BODY_BYTES  # of lists it would be 64 bytes for each 3

FILLINGS = {
    "lists": b"[],",
    "objects": b"{},",
    "keys": b'{"a":1},',
    "strings": b'"",',
}


@pytest.mark.parametrize("url", ROUTES)
@pytest.mark.parametrize("filling", FILLINGS)
async def test_no_body_takes_memory_many_times_its_size(url: str, filling: str) -> None:
    item = FILLINGS[filling]
    body = b'{"user":[' + item * (BODY_BYTES // len(item)) + b"0]}"
    async with client_for(FakeEngine()) as client:
        await client.post(url, content=b"{}")  # what is made once is no body's
        tracemalloc.start()
        try:
            headers = {"Content-Type": "application/json"}
            response = await client.post(url, content=body, headers=headers)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert "the body holds" in str(error_of(response, 400)["message"])
    assert peak < MAX_PEAK


HI = {"role": "user", "content": "hi"}


def past_call(arguments: object) -> dict[str, object]:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [HI, {"role": "assistant", "tool_calls": [call]}, HI]}


def past_item(arguments: object) -> dict[str, object]:
    return {
        "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]
    }


def past_use(arguments: object) -> dict[str, object]:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    messages = [HI, {"role": "assistant", "content": [use]}, HI]
    return {"model": "base/model", "messages": messages, "max_tokens": 1}


LISTS = '{"a":[' + "[]," * (BODY_BYTES // 4) + "[]]}"
NUMBERS: dict[str, object] = {"a": [1.5] * (BODY_BYTES // 4)}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", past_call(LISTS)),
        ("/v1/responses", past_item(LISTS)),
        ("/v1/chat/completions", past_call("x" * BODY_BYTES + "x")),
        ("/v1/messages", past_use(NUMBERS)),
        ("/v1/chat/completions", {"messages": [HI], "chat_template_kwargs": NUMBERS}),
        ("/v1/responses", {"input": "hi", "chat_template_kwargs": NUMBERS}),
        (
            "/v1/messages",
            {**past_use({}), "chat_template_kwargs": NUMBERS},
        ),
    ],
)
async def test_json_within_a_body_is_bounded_too(url: str, body: dict[str, object]) -> None:
    async with client_for(FakeEngine(max_model_len=2**22)) as client:
        error = error_of(await client.post(url, json=body), 400)
    assert "shorten it" in str(error["message"])


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
async def test_all_json_within_a_body_is_bounded_together(route: str) -> None:
    """Each of these texts is below the bound, and makes 30,000 lists: a gigabyte in all."""
    text = '{"a":[' + "[]," * 30_000 + "[]]}"
    if route == "/v1/responses":
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
        body: dict[str, object] = {"input": [item] * 40}
    else:
        call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": text}}
        body = {"messages": [HI, {"role": "assistant", "tool_calls": [call] * 40}, HI]}
    content = json.dumps(body).encode()
    async with client_for(FakeEngine(max_model_len=2**22)) as client:
        tracemalloc.start()
        try:
            response = await client.post(
                route, content=content, headers={"Content-Type": "application/json"}
            )
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert "with all that came before it" in str(error_of(response, 400)["message"])
    assert peak < MAX_PEAK


async def test_a_conversation_is_copied_only_as_often_as_it_is_tried() -> None:
    """Each of 4,096 turns may be the first that fits; all these lists would take 64 MiB."""
    body = {"input": [HI] * 4096, "truncation": "auto"}
    async with client_for(FakeEngine()) as client:
        tracemalloc.start()
        try:
            assert (await client.post("/v1/responses", json=body)).status_code == 200
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 32 * 2**20


def test_what_a_call_keeps_is_counted() -> None:
    """Its arguments are kept as an object, many times as large as their text."""
    arguments = parse_arguments('{"a":[' + "[]," * 9999 + "[]]}", None)
    taken = sys.getsizeof(arguments.value["a"]) + sum(map(sys.getsizeof, arguments.value["a"]))
    assert CallItem("c", "f", arguments).num_bytes > taken
