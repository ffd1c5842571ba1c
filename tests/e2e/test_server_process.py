"""The server as a process: it says why it cannot start. How it ends: test_shutdown.py."""

from __future__ import annotations

from pathlib import Path

import pytest

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
