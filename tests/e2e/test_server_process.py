"""The server as a process: it starts, says why it cannot, and ends at a signal."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerDiedError
from tests.e2e.conftest import StartServer


def test_a_server_that_cannot_start_shows_why(start_server: StartServer, tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    with (
        start_server(missing, tmp_path / "log") as process,
        pytest.raises(ServerDiedError, match="no-such-model") as death,
    ):
        process.wait_until_healthy()
    assert "ended with code" in str(death.value)


def test_a_server_ends_by_itself_when_asked_to(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path: Path
) -> None:
    with start_server(demo_paths.model, tmp_path / "log", "--max-num-seqs", "2") as process:
        process.wait_until_healthy()
        assert process.is_running
        process.stop()
        assert process.wait() == 0, process.last_log_lines()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{process.base_url}/health")
