"""Bodies of every route, over the whole application in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import strategies as st

from lora_serve.config import ServerConfig
from lora_serve.server.anthropic.messages import MESSAGES_PATH
from lora_serve.server.app import create_app
from lora_serve.server.error_shapes import LOAD_PATH, UNLOAD_PATH
from tests.fakes.engine import FakeEngine, fake_config
from tests.hostile.harness import run_long, run_quick
from tests.hostile.mutations import harmed, json_texts
from tests.server.test_fuzz import REQUESTS, ROUTES, TEXTS, URLS, VALUES

MAX_BODY_BYTES = 300_000
ANSWER_SECONDS = 30
STATUSES = (200, 400, 404, 408, 413)

# Besides the examples, which each route has one of.
SOUND = (
    *((url, dict(route.example)) for url, route in ROUTES.items()),
    ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2, "logprobs": 2, "seed": 1}),
)

FIELDS = sorted({name for route in ROUTES.values() for name in route.body.model_fields})
CASES = st.one_of(
    REQUESTS.map(lambda case: (case[0], json.dumps(case[1]).encode())),
    st.tuples(URLS, json_texts(st.sampled_from(FIELDS) | TEXTS, VALUES)),
    *(st.tuples(st.just(url), harmed(json.dumps(body).encode())) for url, body in SOUND),
)


def check_answer(url: str, response: httpx.Response) -> None:
    assert response.status_code in STATUSES, response.text
    if response.status_code == 200:
        return
    body = response.json()
    error = body["error"]
    if url.startswith(MESSAGES_PATH):  # Anthropic's shape
        assert set(body) == {"type", "error", "request_id"}
        assert set(error) == {"type", "message"}
    else:
        is_of_adapters = url in (LOAD_PATH, UNLOAD_PATH)
        assert body == {"error": error, **({"object": "error", **error} if is_of_adapters else {})}
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == response.status_code
    assert 0 < len(error["message"]) < 3000
    assert "Traceback" not in error["message"]


@pytest.fixture(scope="module")
def check() -> Iterator[Callable[[object], None]]:
    config = ServerConfig(max_body_bytes=MAX_BODY_BYTES)
    lax = ServerConfig(max_body_bytes=MAX_BODY_BYTES, ignore_unknown_fields=True)
    apps = [
        create_app(FakeEngine(fake_config()), config),
        create_app(FakeEngine(fake_config(enable_prompt_embeds=True)), lax),
    ]
    with asyncio.Runner() as runner:
        yield lambda case: runner.run(_post(apps, case))


async def _post(apps: list[FastAPI], case: object) -> None:
    assert isinstance(case, tuple)
    url, content = case
    for app in apps:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            async with asyncio.timeout(ANSWER_SECONDS):
                headers = {"Content-Type": "application/json"}
                check_answer(url, await client.post(url, content=content, headers=headers))


def test_no_body_harms_the_server(check: Callable[[object], None]) -> None:
    run_quick(CASES, check, 400)


@pytest.mark.slow
def test_no_body_harms_the_server_for_minutes(check: Callable[[object], None]) -> None:
    assert run_long(CASES, check)
