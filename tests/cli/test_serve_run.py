"""How `lora-serve serve` starts, or does not, as a user sees it: the command itself is run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "lora_serve.cli.main", "serve"]


def start(*arguments: str, temporary: Path = Path("/tmp")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )


def test_a_taken_port_is_told_in_one_line_before_any_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("/no/model/here", "--host", "127.0.0.1", "--port", str(port))
        _, told = server.communicate(timeout=60)
    assert server.returncode == 2
    assert told.startswith("lora-serve: error: cannot listen on --host 127.0.0.1")
    assert told.count("\n") == 1


def test_shares_by_key_need_keys() -> None:
    server = start("/no/model/here", "--port", "0", "--fair-share", "key")
    _, told = server.communicate(timeout=60)
    assert server.returncode == 2
    assert told.startswith("lora-serve: error: --fair-share key needs --api-key")


def group_of(server: subprocess.Popen[str]) -> list[str]:
    """Names of the processes in the server's group.

    One that is ending has no command line any more; it closes its files after that.
    """
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = path.read_text().rsplit(")", 1)
            is_alive = path.with_name("cmdline").read_bytes() != b""
        except OSError:  # it has just ended
            continue
        if int(fields.split()[2]) == server.pid and is_alive:
            names.append(name)
    return names


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_ctrl_c_during_the_start_ends_all_processes_quietly(
    model_path: Path, short_path: Path
) -> None:
    """Twice, as people do, and to the whole group of processes, as terminals do."""
    server = start(str(model_path), "--host", "127.0.0.1", "--port", "0", temporary=short_path)
    while len(group_of(server)) < 3:  # with multiprocessing's own there are three
        assert server.poll() is None, server.communicate()
        time.sleep(0.01)
    os.killpg(server.pid, signal.SIGINT)
    time.sleep(0.05)
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGINT)
    _, told = server.communicate(timeout=30)
    assert server.returncode == 130
    assert told == ""
    assert group_of(server) == []
    assert list(short_path.iterdir()) == []


SCRIPT = """
import asyncio, signal
from multiprocessing import util
from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.engine.frontend.client import EngineClient

spawn = util.spawnv_passfds

def noted(path, args, fds):
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    return spawn(path, args, fds)

async def start():
    client = EngineClient()
    start = asyncio.ensure_future(client.start(EngineConfig(model=ModelConfig(model="none"))))
    while client.pid is None:
        await asyncio.sleep(0.01)
    start.cancel()
    await client.close()

if __name__ == "__main__":  # the engine's process imports this file, too
    util.spawnv_passfds = noted
    asyncio.run(start())
"""


def test_no_process_begins_where_ctrl_c_would_reach_it(tmp_path: Path, short_path: Path) -> None:
    """Before Python itself is ready it would tell of it, at length."""
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TMPDIR": str(short_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True"], done.stderr  # multiprocessing's own, and ours


def test_a_temporary_directory_too_long_for_sockets_is_told(
    model_path: Path, tmp_path: Path
) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    server = start(str(model_path), "--host", "127.0.0.1", "--port", "0", temporary=long)
    _, told = server.communicate(timeout=60)
    assert server.returncode == 2
    assert told.startswith(f"lora-serve: error: temporary directory {long}: ")
    assert told.endswith("set TMPDIR to a shorter path\n")
    assert list(long.iterdir()) == []
