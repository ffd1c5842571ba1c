"""uvicorn's warnings, as a client can cause them, in the log."""

from __future__ import annotations

import logging

import pytest

from lora_serve.server.http import repeated_warnings
from lora_serve.server.http.repeated_warnings import UVICORN, RepeatedWarnings, bounded_warnings
from tests.fakes.engine import FakeEngine
from tests.server.clients import eventually, serving
from tests.server.http.test_connections import connect, rest_of

INVALID = "Invalid HTTP request received."
NO_HTTP = b"EHLO x\r\n\r\n"
WEBSOCKET = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
)


async def test_a_client_that_speaks_no_http_gets_a_line_and_a_count(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(engine) as url, bounded_warnings():
        for _ in range(20):
            for sent in (NO_HTTP, WEBSOCKET):
                reader, writer = await connect(url, sent)
                await rest_of(reader)
                writer.close()
    texts = [record.getMessage() for record in caplog.records]
    assert texts.count(INVALID) == 1
    assert texts.count(f"{INVALID} (19 times more in 10 s)") == 1
    assert len(texts) <= 2 * 3, texts  # of three kinds


async def test_counts_are_told_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(repeated_warnings, "PERIOD_SECONDS", 0.01)
    uvicorn = logging.getLogger(UVICORN)
    async with bounded_warnings():
        for _ in range(3):
            uvicorn.warning(INVALID)
        await eventually(lambda: "2 times more" in caplog.text)
    assert not uvicorn.filters  # the server has ended


def test_errors_and_other_levels_are_told_each_time() -> None:
    record = logging.LogRecord(UVICORN, logging.ERROR, "", 0, "an error", (), None)
    repeated = RepeatedWarnings()
    assert all(repeated.filter(record) for _ in range(3))
