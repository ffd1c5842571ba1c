"""The line that the log has for each request that generates."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_serve.config import LogConfig, ServerConfig
from lora_serve.engine.frontend.admission import RequestGroup
from lora_serve.errors import OverloadedError
from lora_serve.generate_request import GenerateRequest
from lora_serve.observability.log import TEXT_FORMAT, JsonFormatter, TextFormatter
from lora_serve.outputs import OutputDelta
from lora_serve.server.app import create_app
from lora_serve.server.http import access_log
from lora_serve.server.http.drain import Drain
from tests.fakes.engine import MODEL, FakeEngine, write_adapter
from tests.server.clients import client_for, eventually, serving

SECRET = "what nobody else may read"
PATHS = {
    "/v1/completions": {"prompt": SECRET},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}]},
    "/v1/responses": {"input": SECRET},
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": SECRET}],
    },
    "/v1/embeddings": {"input": SECRET},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
    "/generate": {"text": SECRET},
    "/invocations": {"prompt": SECRET},
}


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, access_log.__name__)


def engine_with(**log: Any) -> FakeEngine:
    engine = FakeEngine()
    engine.config = replace(engine.config, log=LogConfig(**log))
    return engine


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.name == access_log.__name__]


def fields(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The values of the one line."""
    (record,) = records(caplog)
    return json.loads(JsonFormatter("server").format(record))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", [TextFormatter(TEXT_FORMAT), JsonFormatter("server")])
async def test_each_route_that_generates_is_one_line_without_a_prompt(
    path: str, form: logging.Formatter, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_for(engine_with()) as client:
        assert (await client.post(path, json=PATHS[path])).status_code == 200
    (record,) = records(caplog)
    line = form.format(record)
    assert path in line
    assert SECRET not in line
    assert "\n" not in line


async def test_a_line_tells_who_asked_which_version_what_it_took_and_how_it_ended(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine = engine_with()
    loaded = await engine.load_lora_adapter("a", write_adapter(tmp_path / "a", "one"))
    config = ServerConfig(api_key=("first", "second"))
    body = {"model": "a", "prompt": "x" * 40, "max_tokens": 5, "request_id": "mine"}
    async with client_for(engine, config) as client:
        headers = {"Authorization": "Bearer second"}
        await client.post("/v1/completions", json=body, headers=headers)
        caplog.clear()
        await client.post("/v1/completions", json=body | {"stream": True}, headers=headers)
    told = fields(caplog)
    (record,) = records(caplog)
    assert told.pop("total_seconds") < 60
    for name in ("time", "level", "logger", "process", "message"):
        told.pop(name)
    assert told == {
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "id": "mine",
        "by": "key 2",
        "model": "a",
        "lora_name": "a",
        "digest": loaded.digest,
        "generation": 0,
        "prompt_tokens": 41,  # with the first of all prompts
        "cached_tokens": 32,
        "generated_tokens": 5,
        "queue_seconds": 0.5,
        "first_token_seconds": 1.0,
        "finish_reason": "length",
    }
    assert record.getMessage().startswith(
        f"POST /v1/completions 200, id mine, by key 2, model a (adapter {loaded.digest}-g0), "
        "41 prompt tokens (32 cached), 5 generated, queue 500.0 ms, first token 1000.0 ms, total "
    )
    assert "second" not in record.getMessage()


async def test_prompts_of_one_body_are_added_up(caplog: pytest.LogCaptureFixture) -> None:
    async with client_for(engine_with()) as client:
        body = {"prompt": ["x" * 10, "y" * 7], "n": 2, "max_tokens": 3}
        await client.post("/v1/completions", json=body)
    told = fields(caplog)
    assert (told["prompt_tokens"], told["generated_tokens"]) == (19, 12)


@pytest.mark.parametrize(
    ("body", "key", "status", "error"),
    [
        ({"prompt": "x", "nonsense": 1}, "k", 400, "BadRequestError"),
        ({"prompt": "x", "model": "absent"}, "k", 404, "NotFoundError"),
        ({"prompt": "x"}, "wrong", 401, "UnauthorizedError"),
    ],
)
async def test_a_refused_request_is_told_of_by_its_status(
    body: dict[str, object], key: str, status: int, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_for(engine_with(), ServerConfig(api_key=("k",))) as client:
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "refused-1"}
        await client.post("/v1/completions", json=body, headers=headers)
    told = fields(caplog)
    assert (told["status"], told["error"], told["id"]) == (status, error, "refused-1")
    assert told["by"] == ("an unknown key" if status == 401 else "key 1")
    assert "finish_reason" not in told or told["finish_reason"] is None


async def test_a_key_that_a_shutdown_left_unread_is_not_called_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drain = Drain()
    drain.begin()
    app = create_app(engine_with(), ServerConfig(api_key=("k",)), drain)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        headers = {"Authorization": "Bearer k"}
        await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    told = fields(caplog)
    assert (told["status"], told["by"]) == (503, "an unchecked key")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_refuses_or_dies_is_told_of(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with()
    async with client_for(engine) as client:
        engine.error = OverloadedError("full")
        await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
        refused = fields(caplog)
        caplog.clear()
        engine.error, engine.fail_after = None, 3
        await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert (refused["status"], refused["error"]) == (503, "ServiceUnavailableError")
    died = fields(caplog)
    assert died["error"] == "ServiceUnavailableError"
    assert died["status"] == (200 if stream else 503)  # a stream has begun
    assert died["finish_reason"] is None
    assert died["generated_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_told_of(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        engine.gate.clear()
        body = {"prompt": "x", "stream": stream}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: engine.growing)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: records(caplog))
    told = fields(caplog)
    assert told["status"] == 499
    assert told["finish_reason"] == "client_left"


class HoldingEngine(FakeEngine):
    """It tells nothing of an answer before its end, like the real one where none is streamed."""

    async def generate(
        self, request: GenerateRequest, group: RequestGroup | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        assert group is not None
        held: list[OutputDelta] = []
        try:
            async for delta in super().generate(request, group):
                held.append(delta)
                if len(held) == 3:
                    self.gate.clear()
            yield held[0]
        finally:
            group.unread += [(request.request_id, delta) for delta in held]


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_what_was_generated_for_a_client_that_left_is_told(
    num_prompts: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = HoldingEngine(engine_with().config)
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": ["x" * 20] * num_prompts}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: not engine.gate.is_set())
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: records(caplog))
    told = fields(caplog)
    assert (told["status"], told["finish_reason"]) == (499, "client_left")
    assert told["generated_tokens"] >= 3
    assert told["first_token_seconds"] >= 0


async def test_a_client_that_leaves_a_stream_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "x" * 30, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                engine.gate.clear()
                break
        await eventually(lambda: records(caplog))
    told = fields(caplog)
    assert (told["status"], told["finish_reason"]) == (200, "client_left")
    assert told["generated_tokens"] >= 1
    assert told["first_token_seconds"] >= 0


async def test_a_response_in_the_background_is_told_of_when_it_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with()
    engine.gate.clear()
    async with client_for(engine) as client:
        await client.post("/v1/responses", json={"input": "x", "background": True})
        assert not records(caplog)
        engine.gate.set()
        await eventually(lambda: records(caplog))
    told = fields(caplog)
    assert (told["status"], told["finish_reason"]) == (200, "stop")
    assert told["generated_tokens"] > 0


async def test_what_a_client_writes_makes_no_second_line_and_no_long_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    evil = (
        "x\n2026-01-01 00:00:00,000 INFO lora_serve: forged\x1b[2J\u2028, status 200" + "y" * 9000
    )
    async with client_for(engine_with()) as client:
        for body in (
            {"prompt": "x", "request_id": evil},
            {"prompt": "x", "model": f"{MODEL}:{evil}"},
            {"prompt": "x", "model": evil},
        ):
            await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "\x1b"})
    assert len(records(caplog)) == 4
    for record in records(caplog):
        line = TextFormatter(TEXT_FORMAT).format(record)
        assert line.isprintable()
        assert len(line) < 2000


async def test_prompts_and_answers_are_shown_if_asked_for_cut_and_on_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_for(engine_with(log_prompts=True, max_log_len=12)) as client:
        await client.post("/v1/completions", json={"prompt": "a\nb" + "c" * 50, "stream": True})
    told = fields(caplog)
    assert told["prompt"] == "a\nb" + "c" * 8  # behind the first token, which has no text
    assert told["answer"] == "You said: a\n"
    (record,) = records(caplog)
    assert "\n" not in record.getMessage()


async def test_the_lines_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    async with client_for(engine_with(disable_log_requests=True, log_prompts=True)) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
    assert not records(caplog)


async def test_other_routes_have_no_line(caplog: pytest.LogCaptureFixture) -> None:
    async with client_for(engine_with()) as client:
        for path in ("/health", "/metrics", "/v1/models"):
            await client.get(path)
        await client.post("/tokenize", json={"prompt": SECRET})
    assert not records(caplog)
