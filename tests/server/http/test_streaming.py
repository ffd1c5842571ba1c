from __future__ import annotations

import json
import logging

import httpx
import pytest

from tests.fakes.engine import FakeEngine
from tests.server.clients import error_of, events

CASES = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
]


@pytest.mark.parametrize(("url", "body"), CASES)
async def test_an_engine_that_dies_in_the_middle_is_told_in_the_stream(
    engine: FakeEngine, client: httpx.AsyncClient, url: str, body: dict
) -> None:
    engine.fail_after = 3
    response = await client.post(url, json={**body, "stream": True})
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert chunks
    assert last["error"] == {
        "message": "the engine process has died",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    assert engine.growing == set()


@pytest.mark.parametrize(("url", "body"), CASES)
async def test_an_engine_that_dies_before_the_first_token_is_an_http_error(
    engine: FakeEngine, client: httpx.AsyncClient, url: str, body: dict
) -> None:
    engine.fail_after = 0
    for is_stream in (False, True):
        error_of(await client.post(url, json={**body, "stream": is_stream}), 503)
    assert engine.growing == set()


@pytest.mark.parametrize(("url", "body"), CASES)
async def test_a_whole_answer_fails_whole(
    engine: FakeEngine, client: httpx.AsyncClient, url: str, body: dict
) -> None:
    engine.fail_after = 3
    error_of(await client.post(url, json=body), 503)
    assert engine.growing == set()


async def test_a_bug_in_the_middle_is_logged_and_kept_from_the_client(
    engine: FakeEngine, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine.tokenizer.token_text = lambda token_id: 1 / 0  # type: ignore[method-assign]
    body = {"prompt": "hi", "stream": True, "logprobs": 1}
    response = await client.post("/v1/completions", json=body)
    (last,) = events(response.text)
    assert last["error"]["type"] == "InternalServerError"
    assert "division" not in response.text
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    assert engine.growing == set()


async def test_what_a_prompt_holds_cannot_end_an_event(client: httpx.AsyncClient) -> None:
    text = "a\n\ndata: [DONE]\n\n\r\u2028\u0085"
    body = {"prompt": text, "stream": True, "echo": True, "max_tokens": 1}
    response = await client.post("/v1/completions", json=body)
    (chunk,) = events(response.text)
    assert chunk["choices"][0]["text"] == f"{text}Y"


async def test_a_stream_may_not_be_kept_back_on_its_way(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
