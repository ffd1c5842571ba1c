"""A directory that a command makes: it is there as a whole, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_serve.errors import ConfigError


def check_is_new(out: Path) -> None:
    """Raise ConfigError where something has that name already."""
    if out.exists():
        raise ConfigError(f"{out} exists already; name a directory that does not")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Give a path to make a directory at; it becomes `out` if nothing is raised.

    Raises:
        ConfigError: something has that name already.
    """
    check_is_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".new-") as workspace:
        made = Path(workspace) / "made"
        yield made
        shutil.move(made, out)
