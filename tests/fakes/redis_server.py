"""A real redis-server of the tests' own, on a free port, stopped at the end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from lora_serve.demo.server_process import dying_with_parent, free_port

EXECUTABLES = ("redis-server", "valkey-server")


class RedisServer:
    """May be started again after a kill, on the same port; then it is empty."""

    def __init__(self, executable: str, directory: Path) -> None:
        self._executable = executable
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        command = (self._executable, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                   "--appendonly", "no", "--dir", str(self._directory))  # fmt: skip
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(dying_with_parent(command), stdout=log, stderr=log)
        self._wait_until_it_answers()

    def kill(self) -> None:
        assert self._process is not None, "not started"
        self._process.kill()
        self._process.wait(10)
        self._process = None

    def pause(self) -> None:
        """It accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        client = redis.Redis(port=self.port, socket_timeout=5)
        try:
            yield client
        finally:
            client.close()

    def stop(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                time.sleep(0.02)
        raise AssertionError(f"redis-server does not answer; see {self._directory}/redis.log")


@contextmanager
def running_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Running, empty and without limits."""
    executable = next((found for one in EXECUTABLES if (found := shutil.which(one))), None)
    if executable is None:
        pytest.skip("NO REDIS-SERVER: the Redis tier is not tested; apt-get install redis-server")
    server = RedisServer(executable, tmp_path_factory.mktemp("redis"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory) as server:
        yield server
