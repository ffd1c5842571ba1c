"""Faults on purpose: kills the engine process, damages files of the disk tier."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random

from lora_serve.errors import ConfigError

DAMAGED_SHARE = 0.5  # of the files


def kill_engine(server_pid: int) -> None:
    """End the engine process of this server with SIGKILL, if it has one now."""
    for pid in _children(server_pid):
        if b"spawn_main" in _command(pid):  # Python's other child only tracks shared memory
            os.kill(pid, signal.SIGKILL)


def damage_files(directory: Path, seed: int) -> None:
    """Flip a bit of, cut off or delete files, as failing disks and careless scripts do."""
    rng = Random(seed)
    for path in sorted(directory.rglob("*")):
        if path.is_file() and rng.random() < DAMAGED_SHARE:
            try:
                _damage(path, rng)
            except FileNotFoundError:  # the server evicts and renames meanwhile
                continue


def _damage(path: Path, rng: Random) -> None:
    size = path.stat().st_size
    how = rng.choice(("flip", "cut", "delete"))
    if how == "delete":
        path.unlink()
    elif how == "cut":
        os.truncate(path, rng.randrange(size + 1))
    elif size:
        with path.open("r+b") as file:
            file.seek(position := rng.randrange(size))
            flipped = file.read(1)[0] ^ (1 << rng.randrange(8))
            file.seek(position)
            file.write(bytes([flipped]))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError as error:
        raise ConfigError(
            f"--faults kill needs /proc, where processes are listed: {error}"
        ) from error
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
