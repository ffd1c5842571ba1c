"""One virtual environment a peer, outside the repository. Knows nothing of any peer.

A finished environment carries a mark; a half-built one is built again from the start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TORCH = "torch==2.13.0"  # first and pinned: whatever else asks for torch must not choose one


class InstallError(Exception):
    """A peer that cannot be installed here; the message says which command failed, and how."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A directory with `venv/`, a log of every install command, and what the peer adds to it."""

    root: Path
    nice: int = 10  # long builds must not disturb what else runs on the machine

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.root / "install.log"

    def pip(self, *arguments: str) -> None:
        self.run([str(self.python), "-m", "pip", "install", "--quiet", *arguments])

    def program(self, name: str) -> str:
        """Path of a program that a package installed here."""
        return str(self.root / "venv" / "bin" / name)

    def run(
        self,
        command: Sequence[str],
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Run to the end; the output goes to the log. Raises InstallError with its last lines.

        variables: environment variables besides our own.
        """
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            done = subprocess.run(
                ["nice", "-n", str(self.nice), *command],
                cwd=cwd or self.root,
                env={**os.environ, **(variables or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            tail = " / ".join(self.log.read_text(errors="replace").splitlines()[-3:])
            raise InstallError(f"{' '.join(command)[:120]} failed: {tail[-400:]}")


def create_venv(directory: Path) -> None:
    venv.create(directory, with_pip=True)


def ensure_environment(
    root: Path,
    recipe: str,
    install: Callable[[Environment], None],
    create: Callable[[Path], None] = create_venv,
) -> None:
    """Build an environment unless a finished one of this recipe is there.

    Args:
        root: directory of the environment.
        recipe: names what is installed; another recipe builds anew.
        install: fills the new, empty environment.
        create: makes the virtual environment itself.

    Raises:
        InstallError: a command failed; the environment is left unmarked, for its log to be read.
    """
    mark = root / "installed"
    if mark.is_file() and mark.read_text() == recipe:
        return
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    print(f"installing {recipe} (log: {root / 'install.log'})", file=sys.stderr, flush=True)
    create(root / "venv")
    install(Environment(root))
    mark.write_text(recipe)
