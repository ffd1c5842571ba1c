"""The systemd unit: systemd takes it, it gives little away, and it drains."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.command_lines import UNIT, settings, unit_command

MOST_EXPOSED = 2.0  # of systemd-analyze's 0 to 10, where a unit without any option has 9.6


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with this machine's Python as its program, since systemd looks for it."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("*** THE SYSTEMD UNIT IS NOT VERIFIED: systemd-analyze is missing ***")
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/lora-serve/bin/lora-serve", sys.executable))
    return path


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def option(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def test_systemd_takes_it(unit: Path) -> None:
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_would_have_told_of_a_typo(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectClock=yes", "ProtectClok=yes"))
    assert "ProtectClok" in analyze("verify", "--man=no", str(unit)).stderr


def test_a_hole_in_the_server_gains_little(unit: Path) -> None:
    done = analyze("security", "--offline=true", str(unit))
    (level,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert float(level) <= MOST_EXPOSED, done.stdout


def test_the_server_takes_its_command_and_asks_for_keys() -> None:
    engine, server = settings(unit_command())
    assert server.api_key_file
    assert server.admin_api_key_file
    assert server.ssl_certfile
    assert server.metrics_host == "127.0.0.1"
    assert engine.lora.lora_allowed_roots


def test_answers_may_end_before_anything_is_killed() -> None:
    _, server = settings(unit_command())
    assert option("KillMode") == "mixed", "the engine is the server's to end"
    assert int(option("TimeoutStopSec")) >= server.drain_timeout + 10


def test_what_the_server_writes_lies_where_it_may() -> None:
    engine, _ = settings(unit_command())
    writable = f"/var/cache/{option('CacheDirectory')}"
    assert str(engine.kv_tiers.kv_disk_path).startswith(f"{writable}/")
    assert option("Environment") == f"HOME={writable}"
    assert option("ProtectSystem") == "strict"
