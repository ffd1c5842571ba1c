from __future__ import annotations

import asyncio

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.admin.aborts import known_as
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of

HI = [{"role": "user", "content": "hi"}]
ASKED = {"prompt": "Hello", "max_tokens": 4}


async def begin(
    engine: FakeEngine, client: httpx.AsyncClient, request_id: str, key: str = ""
) -> asyncio.Task[httpx.Response]:
    num_before = len(engine.growing)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {**ASKED, "request_id": request_id}
    task = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
    while len(engine.growing) == num_before:
        await asyncio.sleep(0)
    return task


async def test_requests_are_aborted_by_the_ids_that_clients_know(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.gate.clear()
    tasks = [await begin(engine, client, name) for name in ("a", "b", "cmpl-c")]
    for body, num in (
        ({"request_ids": ["a"]}, 1),
        ({"request_ids": ["cmpl-a", "cmpl-b"]}, 2),
        ({"request_ids": ["cmpl-c"]}, 1),
        ({"request_ids": ["cmpl-cmpl-c", "d"]}, 1),
        ({"request_ids": []}, 0),
        ({"request_ids": None}, 3),
        ({}, 3),
    ):
        answer = await client.post("/abort_requests", json=body)
        assert answer.json() == {"aborted": num, "status": "aborted"}, body
    assert (await client.post("/abort_requests")).json()["aborted"] == 3
    engine.gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/messages", {"model": "base/model", "messages": HI, "max_tokens": 4}),
    ],
)
async def test_every_answers_id_aborts_its_request(
    engine: FakeEngine, client: httpx.AsyncClient, url: str, body: dict[str, object]
) -> None:
    headers = {"X-Request-Id": "mine"}
    shown = (await client.post(url, json=body, headers=headers)).json()["id"]
    assert shown.endswith("mine")
    assert known_as([shown])(engine.seen[-1])
    assert not known_as([f"other{shown}"])(engine.seen[-1])


async def test_a_caller_aborts_no_requests_of_another_key(engine: FakeEngine) -> None:
    config = ServerConfig(api_key=("one", "two"), admin_api_key=("admin",))
    async with client_for(engine, config) as client:
        engine.gate.clear()
        tasks = [await begin(engine, client, "same", key) for key in ("one", "two")]
        for key, num in (("one", 1), ("two", 1), ("admin", 2)):
            answer = await client.post(
                "/inference/v1/abort_requests",
                json={"request_ids": ["same"]},
                headers={"Authorization": f"Bearer {key}"},
            )
            assert answer.json()["aborted"] == num, key
        engine.gate.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("body", [{}, {"request_ids": "a"}, {"request_ids": [""]}])
async def test_ids_that_cannot_be_read_are_refused(client: httpx.AsyncClient, body: object) -> None:
    error_of(await client.post("/inference/v1/abort_requests", json=body), 400)
