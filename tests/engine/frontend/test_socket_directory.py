from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lora_serve.engine.frontend.socket_directory import SocketDirectory

KILLED = """
import os, signal, sys
from pathlib import Path
from lora_serve.engine.frontend.socket_directory import SocketDirectory
print(SocketDirectory(Path(sys.argv[1])).path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def age(path: Path, seconds: float = 3600) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def leave_one_behind(parent: Path) -> Path:
    told = subprocess.run([sys.executable, "-c", KILLED, str(parent)], capture_output=True)
    return Path(told.stdout.decode().strip())


def test_only_its_user_may_look_into_it(short_path: Path) -> None:
    directory = SocketDirectory(short_path)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.close()
    assert list(short_path.iterdir()) == []


def test_what_a_killed_server_left_is_removed_by_the_next(short_path: Path) -> None:
    left = leave_one_behind(short_path)
    assert left.is_dir()
    directory = SocketDirectory(short_path)
    assert list(short_path.iterdir()) == [directory.path]
    directory.close()


def test_the_directory_of_a_living_server_stays_however_old_it_is(short_path: Path) -> None:
    living = SocketDirectory(short_path)
    age(living.path)
    SocketDirectory(short_path).close()
    assert living.path.is_dir()
    living.close()


@pytest.mark.parametrize("name", [".lora-serve-sockets-unready", "lora-serve-sockets-young"])
def test_one_without_a_lock_is_removed_only_once_it_is_old(short_path: Path, name: str) -> None:
    """It was just made, or its owner was killed before it had the lock."""
    young = short_path / name
    young.mkdir()
    SocketDirectory(short_path).close()
    assert young.is_dir()
    age(young)
    SocketDirectory(short_path).close()
    assert not young.exists()


def test_others_directories_stay(short_path: Path) -> None:
    other = short_path / "lora-serve-bench-x"
    other.mkdir()
    age(other)
    SocketDirectory(short_path).close()
    assert other.is_dir()


def test_one_that_is_closed_twice_closes_no_descriptor_of_others(short_path: Path) -> None:
    directory = SocketDirectory(short_path)
    directory.close()
    with (short_path / "another").open("w") as file:  # takes the number that has become free
        directory.close()
        file.write("is open")
