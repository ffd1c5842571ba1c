"""Start a server for a benchmark, wait until it answers, and stop it whatever happened."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from lora_serve.bench.http_stream import HttpFault, Origin, request
from lora_serve.errors import ConfigError

STOP_SECONDS = 20.0


class ServerFailedError(ConfigError):
    """The server ended, or did not answer in time; the message has the end of its log."""


@asynccontextmanager
async def running_server(
    command: Sequence[str],
    url: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    ready_path: str = "/health",
    patience_seconds: float = 300.0,
) -> AsyncIterator[int]:
    """Run `command` while the context lasts, from when `ready_path` answers 200; gives its pid.

    In the main thread SIGTERM ends the context too, so that no server outlives its benchmark.

    Raises:
        ServerFailedError: it ended first, or was not ready after `patience_seconds`.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        with _cancelled_by_sigterm():
            await _until_ready(process, Origin.parse(url), ready_path, log, patience_seconds)
            yield process.pid
    finally:
        await asyncio.to_thread(_stop, process)


def lora_serve_command(model: str, port: int, arguments: Sequence[str]) -> list[str]:
    """The command that serves `model` on this machine with this Python."""
    local = ("--host", "127.0.0.1", "--port", str(port))
    return [sys.executable, "-m", "lora_serve.cli.main", "serve", model, *local, *arguments]


def cpu_seconds(pid: int) -> float:
    """Processor time that a process of this machine has used, without its children's.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) of Linux makes it


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """While the context lasts, SIGTERM cancels the task that entered it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "only tasks enter"
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _until_ready(
    process: subprocess.Popen[bytes], origin: Origin, path: str, log: Path, patience: float
) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailedError(f"the server ended with {process.returncode}: {_tail(log)}")
        if await _answers(origin, path):
            return
        await asyncio.sleep(0.2)
    raise ServerFailedError(f"the server did not answer after {patience:g} s: {_tail(log)}")


async def _answers(origin: Origin, path: str) -> bool:
    try:
        async with asyncio.timeout(5), request(origin, "GET", path, {}) as response:
            return response.status == 200
    except (OSError, HttpFault):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # an engine process must not outlive its server
    process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-4:])[-600:] or "it wrote nothing"
