"""`lora-serve check` against our own server, right and with a bug put back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_serve.cli.main import main
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer, ready

ROOT = Path(__file__).parents[2]
RIGHT = (
    *("cached-logprobs", "longer-prompts", "two-adapters", "cache-salts", "same-path-in-place"),
    *("replace-while-running", "aborted-streams", "equal-prompts-at-once", "admin-races"),
)
STALE = ("reload-in-place", "reload-after-unload", "name-reuse", "roll-back")
MUTANT = """
import lora_serve.identity
from tests.fakes.mutant_hashers import KeyHoldsOnlyTheName

lora_serve.identity.BlockHasher = KeyHoldsOnlyTheName
"""


def verdicts(url: str, probes: tuple[str, ...], report: Path) -> dict[str, str]:
    main(["check", url, "--json", str(report), *(f"--probe={name}" for name in probes)])
    return {one["name"]: one["verdict"] for one in json.loads(report.read_text())["probes"]}


def test_our_own_server_passes(server: ServerProcess, tmp_path: Path) -> None:
    found = verdicts(server.base_url, RIGHT, tmp_path / "out.json")
    assert found == dict.fromkeys(RIGHT, "pass")


def test_our_own_server_fails_with_keys_that_hold_only_names(
    model_path: Path, start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(MUTANT)  # which every process of it imports
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with start_server(model_path, tmp_path / "log", "--enable-lora") as process:
        found = verdicts(ready(process).base_url, (*STALE, "cached-logprobs"), tmp_path / "out")
    assert found == {**dict.fromkeys(STALE, "fail"), "cached-logprobs": "pass"}
