from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_serve.cli import hub
from lora_serve.cli.hub import OFFLINE, is_hub_id, prepare_hub, unreachable
from lora_serve.demo.server_process import free_port
from tests.fakes.hub import serve_hub


def run_serve(model: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "HF_HOME": str(home),
    }
    command = [sys.executable, "-m", "lora_serve.cli.main", "serve", model, "--port", "0"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_serve_says_at_once_that_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    done = run_serve("nobody/nothing", tmp_path)
    assert done.returncode == 2
    to_serve, refusal = done.stderr.splitlines()  # and no library has tried in vain between
    assert ": to serve nobody/nothing " in to_serve
    assert refusal.startswith(
        "lora-serve: error: model 'nobody/nothing' is not a directory here, and the hub at http"
    )
    assert "check the network" in refusal


def test_a_host_answers_or_none_does() -> None:
    with serve_hub("org/name", {}) as endpoint:
        assert unreachable(endpoint) is None
    assert "refused" in (unreachable(endpoint) or "")
    assert unreachable("http://") is not None


def test_directories_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OFFLINE, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    prepare_hub([str(tmp_path), "not-an-id"], None)
    assert OFFLINE not in os.environ


def test_a_path_with_one_slash_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "organisation" / "here").mkdir(parents=True)
    assert is_hub_id("organisation/name")
    assert not any(map(is_hub_id, ("/name", "./name", "~/name", "name", "organisation/here")))


def test_a_hub_whose_addresses_never_answer_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(hub, "_fault_of", lambda endpoint: time.sleep(30))
    began = time.monotonic()
    assert unreachable("http://10.255.255.1") == "no answer in 0.2 s"
    assert time.monotonic() - began < 10
