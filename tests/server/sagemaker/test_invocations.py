"""POST /invocations answers as the route whose body it was given."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from lora_serve.server.sagemaker.invocations import ADAPTER_HEADER
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import Json, error_of, events

MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/embeddings": {"input": ["Once", "twice"]},
    "/pooling": {"input": ["Once", "twice"], "task": "token_embed"},
    "/score": {"text_1": "Once", "text_2": ["twice", "thrice"]},
    "/rerank": {"query": "Once", "documents": ["twice", "thrice"]},
}


def content(answer: Json) -> Json:
    """The answer without its id, its time, and what the cache had of its prompt."""
    return {name: answer[name] for name in answer if name not in ("id", "created", "usage")}


@pytest.mark.parametrize("route", BODIES)
async def test_it_answers_as_the_route_that_has_such_a_body(
    client: httpx.AsyncClient, route: str
) -> None:
    there = (await client.post(route, json=BODIES[route])).json()
    here = await client.post("/invocations", json=BODIES[route])
    assert here.status_code == 200
    assert content(here.json()) == content(there)


async def test_messages_with_an_encoding_are_embedded(client: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "encoding_format": "float"}
    there = (await client.post("/v1/embeddings", json=body)).json()
    here = (await client.post("/invocations", json=body)).json()
    assert here["data"] == there["data"] != []


async def test_it_streams(client: httpx.AsyncClient) -> None:
    body = {**BODIES["/v1/chat/completions"], "stream": True}
    told = events((await client.post("/invocations", json=body)).text)
    assert told[0]["object"] == "chat.completion.chunk"


async def test_messages_make_it_a_chat_whatever_else_is_there(client: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "prompt": "Once"}
    error = error_of(await client.post("/invocations", json=body), 400)
    assert "unknown field `prompt`" in error["message"]


async def test_the_header_names_the_adapter_before_the_body_does(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant-a", write_adapter(tmp_path / "a", "ALPHA"))
    headers = {ADAPTER_HEADER: "tenant-a"}
    for route, body in BODIES.items():
        body = {**body, "model": "base/model"}
        answer = (await client.post("/invocations", json=body, headers=headers)).json()
        by_name = (await client.post(route, json={**body, "model": "tenant-a"})).json()
        assert content(answer) == content(by_name)
    for unknown in ("nobody", "a" * 1024):
        refused = await client.post("/invocations", json=body, headers={ADAPTER_HEADER: unknown})
        error_of(refused, 404)
    long = await client.post("/invocations", json=body, headers={ADAPTER_HEADER: "a" * 1025})
    assert "at most 1024 characters, got 1025" in error_of(long, 400)["message"]


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"model": "alias"}, [], 7, "a"])
async def test_a_body_of_no_kind_is_told_which_there_are(
    client: httpx.AsyncClient, body: object
) -> None:
    error = error_of(await client.post("/invocations", json=body), 400)
    assert "must have messages (for a chat), prompt or prompt_embeds" in error["message"]


async def test_a_fault_is_named_by_its_field(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": 7}]}
    error = error_of(await client.post("/invocations", json=body), 400)
    assert error["param"] == "messages[0].role"
