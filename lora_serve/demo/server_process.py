"""Starts, awaits and stops `lora-serve serve` in a process of its own.

It runs in a session of its own, so that Ctrl-C reaches it only through `stop`. Where the system can
do that, it is killed when the process that started it dies, however that happens.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

_START_SECONDS = 300.0
_STOP_SECONDS = 20.0
_SHOWN_LOG_LINES = 20


class ServerDiedError(RuntimeError):
    """The server ended, or never became ready; carries the end of its log."""


class ServerProcess:
    """One server. `flags` are those of `lora-serve serve` but for the port; 0 picks a free one."""

    def __init__(self, model: Path, flags: Sequence[str], log_path: Path, *, port: int = 0) -> None:
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self.command = (
            *(sys.executable, "-m", "lora_serve.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *flags,
        )
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                dying_with_parent(self.command),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_healthy():
            if not self.is_running:
                raise ServerDiedError(self._story(f"ended with code {self._process.returncode}"))
            if time.monotonic() > deadline:
                raise ServerDiedError(self._story(f"was not ready in {_START_SECONDS:.0f} s"))
            time.sleep(0.1)

    def wait(self) -> int:
        """Wait until it ends by itself; returns its exit code."""
        return self._process.wait()

    def begin_to_stop(self) -> None:
        """Ask it to end; `stop` then waits for less."""
        self._process.terminate()

    def stop(self) -> None:
        """Ask it to end, and end it if it does not."""
        self.begin_to_stop()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_log_lines(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_SHOWN_LOG_LINES:])

    def _is_healthy(self) -> bool:
        try:
            # verify: else every look reads all certificates of the machine, for no use here
            reply = httpx.get(f"{self.base_url}/health", timeout=5.0, verify=False)
            return reply.status_code == 200
        except httpx.TransportError:
            return False

    def _story(self, what: str) -> str:
        return f"the server {what}; {self.log_path} ends with\n{self.last_log_lines()}"


def dying_with_parent(command: Sequence[str]) -> tuple[str, ...]:
    """Have the command killed with the thread that starts it, where there is util-linux."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL", "--", *command) if setpriv else tuple(command)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
