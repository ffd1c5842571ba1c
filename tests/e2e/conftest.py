"""Real server processes over the demo's model, started when a test first needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from lora_serve.demo.client import Client
from lora_serve.demo.model import DemoPaths, ensure_demo
from lora_serve.demo.scenarios import Server, server_flags
from lora_serve.demo.server_process import ServerProcess
from lora_serve.demo.stage import Stage


class StartServer(Protocol):
    """Starts a server with flags of its own and those of --server-flags; waits for nothing."""

    def __call__(self, model: Path, log_path: Path, *flags: str) -> ServerProcess: ...


TIGHT_NUM_BLOCKS = 120  # of 16 tokens: the trace's requests need some 40 each


@pytest.fixture(scope="session")
def demo_paths() -> DemoPaths:
    return ensure_demo(print)


@pytest.fixture(scope="session")
def more_flags(request: pytest.FixtureRequest) -> list[str]:
    flags: str = request.config.getoption("--server-flags")
    return flags.split()


@pytest.fixture(scope="session")
def start_server(more_flags: list[str]) -> StartServer:
    def start(model: Path, log_path: Path, *flags: str) -> ServerProcess:
        return ServerProcess(model, (*flags, *more_flags), log_path)

    return start


@pytest.fixture(scope="session")
def stage(
    demo_paths: DemoPaths, tmp_path_factory: pytest.TempPathFactory, more_flags: list[str]
) -> Iterator[Stage]:
    with Stage(demo_paths.model, tmp_path_factory.mktemp("logs"), {}, more_flags) as stage:
        yield stage


@pytest.fixture(scope="session")
def server(stage: Stage) -> ServerProcess:
    """A server with prefix caching."""
    return ready(stage.start(Server.CACHED))


@pytest.fixture(scope="session")
def cold_server(stage: Stage) -> ServerProcess:
    """A server without prefix caching: asked one thing at a time, the promise's cold server."""
    return ready(stage.start(Server.UNCACHED))


@pytest.fixture(scope="session")
def tight_server(
    demo_paths: DemoPaths, tmp_path_factory: pytest.TempPathFactory, start_server: StartServer
) -> Iterator[ServerProcess]:
    """A server of so few blocks that requests preempt each other; invariants are checked."""
    flags = (
        *server_flags(Server.CACHED),
        *("--num-gpu-blocks-override", str(TIGHT_NUM_BLOCKS)),
        *("--max-num-seqs", "16", "--max-model-len", "1024", "--validate"),
    )
    log_path = tmp_path_factory.mktemp("logs") / "tight.log"
    with start_server(demo_paths.model, log_path, *flags) as process:
        yield ready(process)


@pytest.fixture(scope="session")
def overlapped_server(
    demo_paths: DemoPaths, tmp_path_factory: pytest.TempPathFactory, start_server: StartServer
) -> Iterator[ServerProcess]:
    """Plans each step while the one before it runs, as on a GPU."""
    flags = (*server_flags(Server.CACHED), "--async-scheduling", "--validate")
    log_path = tmp_path_factory.mktemp("logs") / "overlapped.log"
    with start_server(demo_paths.model, log_path, *flags) as process:
        yield ready(process)


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.base_url) as client:
        yield client


@pytest.fixture(scope="session")
def cold_client(cold_server: ServerProcess) -> Iterator[Client]:
    with Client(cold_server.base_url) as client:
        yield client


def ready(process: ServerProcess) -> ServerProcess:
    process.wait_until_healthy()
    return process
