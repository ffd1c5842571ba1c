from __future__ import annotations

import asyncio

import httpx
import pytest

from lora_serve.errors import PauseEndedError
from lora_serve.identity import EVERYTHING
from tests.fakes.engine import FakeEngine
from tests.server.clients import error_of

HI = [{"role": "user", "content": "hi"}]
ASKED = {"prompt": "Hello", "max_tokens": 4}


async def test_a_pause_keeps_what_comes_until_it_is_resumed(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    assert (await client.get("/is_paused")).json() == {"is_paused": False}
    assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    asked = asyncio.create_task(client.post("/v1/completions", json=ASKED))
    await asyncio.sleep(0.02)
    assert not asked.done()
    assert (await client.post("/resume")).json() == {"status": "resumed"}
    assert (await asked).status_code == 200
    assert (await client.get("/is_paused")).json() == {"is_paused": False}


@pytest.mark.parametrize(
    ("query", "mode", "resets"),
    [
        ("", "abort", []),
        ("?mode=wait&clear_cache=true", "wait", [EVERYTHING]),
        ("?mode=keep&clear_cache=false", "keep", []),
    ],
)
async def test_a_pause_says_what_becomes_of_requests_and_of_the_cache(
    engine: FakeEngine, client: httpx.AsyncClient, query: str, mode: str, resets: list[object]
) -> None:
    assert (await client.post(f"/pause{query}")).status_code == 200
    assert engine.pauses == [mode]
    assert engine.resets == resets


@pytest.mark.parametrize(
    ("query", "param"), [("mode=stop", "mode"), ("clear_cache=2", "clear_cache"), ("m=1", "m")]
)
async def test_a_pause_that_cannot_be_read_pauses_nothing(
    engine: FakeEngine, client: httpx.AsyncClient, query: str, param: str
) -> None:
    assert error_of(await client.post(f"/pause?{query}"), 400)["param"] == param
    assert not engine.is_paused


@pytest.mark.parametrize(
    ("query", "body", "mode", "resets"),
    [
        ("", {"mode": "keep"}, "keep", []),
        ("", {"mode": "wait", "clear_cache": True}, "wait", [EVERYTHING]),
        ("?mode=keep&clear_cache=1", {"mode": "keep", "clear_cache": True}, "keep", [EVERYTHING]),
        ("?clear_cache=false", {"mode": "keep"}, "keep", []),
        ("?mode=keep", {}, "keep", []),
    ],
)
async def test_a_pause_may_say_in_its_body_what_its_query_may_say(
    engine: FakeEngine,
    client: httpx.AsyncClient,
    query: str,
    body: dict[str, object],
    mode: str,
    resets: list[object],
) -> None:
    assert (await client.post(f"/pause{query}", json=body)).status_code == 200
    assert engine.pauses == [mode]
    assert engine.resets == resets


@pytest.mark.parametrize(
    ("query", "body", "param"),
    [
        ("", {"mode": "stop"}, "mode"),
        ("", {"colour": "red"}, "colour"),
        ("", {"clear_cache": 1}, "clear_cache"),
        ("?mode=abort", {"mode": "keep"}, "mode"),
        ("?clear_cache=0", {"clear_cache": True}, "clear_cache"),
    ],
)
async def test_a_pause_whose_body_is_unknown_or_says_otherwise_pauses_nothing(
    engine: FakeEngine,
    client: httpx.AsyncClient,
    query: str,
    body: dict[str, object],
    param: str,
) -> None:
    assert error_of(await client.post(f"/pause{query}", json=body), 400)["param"] == param
    assert not engine.is_paused


@pytest.mark.parametrize(("query", "body"), [("?mode=keep", {}), ("", {"mode": "keep"})])
async def test_a_resume_takes_nothing(
    engine: FakeEngine, client: httpx.AsyncClient, query: str, body: dict[str, object]
) -> None:
    await client.post("/pause?mode=keep")
    assert error_of(await client.post(f"/resume{query}", json=body), 400)["param"] == "mode"
    assert engine.is_paused


async def test_a_pause_that_another_caller_ends_is_a_conflict(
    engine: FakeEngine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(mode: str) -> None:
        raise PauseEndedError("the server was resumed")

    monkeypatch.setattr(engine, "pause", ended)
    error_of(await client.post("/pause?mode=wait"), 409)
