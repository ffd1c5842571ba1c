from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from starlette.requests import ClientDisconnect

from lora_serve.server.http.disconnect import unless_disconnected
from tests.fakes.engine import FakeEngine
from tests.server.clients import eventually, serving

BODY = {"prompt": ["hi", "ho"], "max_tokens": 50}


async def test_work_is_done_while_the_client_stays() -> None:
    async def receive() -> dict[str, str]:
        return await asyncio.Future()

    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    assert await unless_disconnected(receive, work()) == 5


async def test_an_error_of_the_work_is_the_callers() -> None:
    async def receive() -> dict[str, str]:
        return await asyncio.Future()

    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await unless_disconnected(receive, work())


async def test_work_has_ended_when_the_client_has_left() -> None:
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])
    was_cancelled = False

    async def receive() -> dict[str, str]:
        return next(messages)

    async def work() -> None:
        nonlocal was_cancelled
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # as a message to an engine takes its time
            was_cancelled = True
            raise

    with pytest.raises(ClientDisconnect):
        await unless_disconnected(receive, work())
    assert was_cancelled


async def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    async def wait_for_ever() -> dict[str, str]:
        return await asyncio.Future()

    before = asyncio.all_tasks()
    task = asyncio.create_task(unless_disconnected(wait_for_ever, wait_for_ever()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_aborted(
    engine: FakeEngine, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine.gate.clear()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        body = {**BODY, "stream": is_stream}
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: len(engine.growing) == 2)
        assert (await client.get("/load")).json() == {"server_load": 1}
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await eventually(lambda: not engine.growing)
        assert len(engine.ended_early) == 2
        assert (await client.get("/load")).json() == {"server_load": 0}
        metrics = (await client.get("/metrics")).text
    assert 'handler="/v1/completions",method="POST",status="499"} 1.0' in metrics
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_aborted(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        body = {**BODY, "prompt": "x" * 200, "max_tokens": 250, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    engine.gate.clear()
                    break
        await eventually(lambda: not engine.growing)
    assert len(engine.ended_early) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_client_that_leaves_while_it_sends_is_no_error(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(engine) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=url) as client:
            metrics = ""

            async def has_counted() -> bool:
                nonlocal metrics
                metrics = (await client.get("/metrics")).text
                return 'status="499"' in metrics

            async with asyncio.timeout(5):
                while not await has_counted():
                    await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
