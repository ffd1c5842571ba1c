from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from lora_serve.bench.http_stream import Origin, request
from lora_serve.bench.server import (
    ServerFailedError,
    lora_serve_command,
    running_server,
)
from lora_serve.demo.server_process import free_port


def http_command(port: int) -> list[str]:
    return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]


async def test_a_server_answers_while_the_context_lasts_and_is_gone_after(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        running_server(http_command(port), url, tmp_path / "log", ready_path="/"),
        request(Origin.parse(url), "GET", "/", {}) as response,
    ):
        assert response.status == 200
    with pytest.raises(OSError, match=str(port)):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(ServerFailedError, match="ended with 1: no such model"):
        async with running_server(command, "http://127.0.0.1:1", tmp_path / "log"):
            pass


async def test_a_server_that_never_answers_is_given_up_and_stopped(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    context = running_server(http_command(port), url, tmp_path / "log", patience_seconds=1.0)
    with pytest.raises(ServerFailedError, match="did not answer after 1 s"):  # /health is a 404
        async with context:
            pass
    with pytest.raises(OSError, match=str(port)):
        await asyncio.open_connection("127.0.0.1", port)


async def test_sigterm_stops_the_server_with_the_benchmark(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    async def measure() -> None:
        async with running_server(http_command(port), url, tmp_path / "log", ready_path="/"):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(measure())
    with pytest.raises(OSError, match=str(port)):
        await asyncio.open_connection("127.0.0.1", port)


def test_our_own_server_is_started_with_this_python() -> None:
    command = lora_serve_command("dir", 8123, ["--enable-lora"])
    assert command[0] == sys.executable
    assert command[3:] == ["serve", "dir", "--host", "127.0.0.1", "--port", "8123", "--enable-lora"]
