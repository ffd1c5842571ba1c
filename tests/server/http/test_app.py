"""The server as a process sees it: started, stopped by a signal, gone without losing an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.server.app import run_server
from lora_serve.server.http.listener import open_listeners
from tests.fakes.engine import FakeEngine
from tests.server.clients import error_of, events, eventually

READY = "lora-serve is ready on "


async def started(capsys: pytest.CaptureFixture[str]) -> str:
    """The address in the line that says so."""
    text = ""
    async with asyncio.timeout(10):
        while "\n" not in text:
            await asyncio.sleep(0.01)
            text += capsys.readouterr().out
    assert text.startswith(READY)
    assert text.count("\n") == 1
    return text.removeprefix(READY).strip()


async def run(engine: FakeEngine, config: ServerConfig) -> None:
    await run_server(engine, config, open_listeners(config))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_server_once_every_answer_is_sent(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    server = asyncio.create_task(run(engine, ServerConfig(host="127.0.0.1", port=0)))
    url = await started(capsys)
    engine.gate.clear()
    async with httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "hi", "stream": True}
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: engine.growing)
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.2)
        assert not server.done()
        assert not engine.was_shut_down
        async with httpx.AsyncClient(base_url=url) as late:
            assert "shutting down" in error_of(await late.get("/health"), 503)["message"]
            refusal = await late.post("/v1/completions", json=body)
            assert "shutting down" in error_of(refusal, 503)["message"]
            assert refusal.headers["retry-after"] == "1"
            assert (await late.get("/metrics")).status_code == 200
        engine.gate.set()
        assert len(events((await answer).text)) == 15
    await asyncio.wait_for(server, 10)
    assert engine.was_shut_down


async def test_a_server_answers_on_a_unix_socket(
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    server = asyncio.create_task(run(engine, ServerConfig(uds=path)))
    assert await started(capsys) == f"unix:{path}"
    assert f"listening on {path} without an API key" in caplog.text
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi"})
        assert answer.json()["choices"][0]["text"] == "You said: hi #0"
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(server, 10)
    assert not Path(path).exists()


@pytest.mark.parametrize("drain_timeout", [0.2, 60])
async def test_what_is_not_finished_in_time_ends_with_an_error(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], drain_timeout: float
) -> None:
    config = ServerConfig(host="127.0.0.1", port=0, drain_timeout=drain_timeout)
    server = asyncio.create_task(run(engine, config))
    url = await started(capsys)
    engine.gate.clear()
    async with httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "hi"}
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: engine.growing)
        os.kill(os.getpid(), signal.SIGTERM)
        if drain_timeout == 60:  # a second signal ends the patience
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
        error_of(await answer, 503)
    await asyncio.wait_for(server, 10)


async def test_an_address_that_another_server_took_meanwhile_ends_the_engine(
    engine: FakeEngine,
) -> None:
    config = ServerConfig(host="127.0.0.1", port=0)
    with closing(open_listeners(config)) as listeners:
        address = listeners.api.getsockname()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(address)
            other.listen()
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {address[1]}"):
                await run_server(engine, config, listeners)
    assert engine.was_shut_down
