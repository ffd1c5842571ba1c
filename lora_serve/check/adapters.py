"""Adapters to probe with: made up for a model of which only config.json is read, or the user's.

Each version keeps a directory of its own. Probes load copies of it, whose files they may overwrite.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lora_serve.demo.random_adapters import Projections, write_random_adapter
from lora_serve.errors import ConfigError
from lora_serve.fuzz.versions import WEIGHTS, overwrite

OLD_SECONDS = 1_000_000_000  # a time of files that is older than any that a server has seen


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What config.json says of the attention layers of a model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, directory: Path) -> ModelShape:
        """Raises ConfigError where there is no such model."""
        path = directory / "config.json"
        try:
            config = json.loads(path.read_text())
            hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
            return cls(
                hidden_size=int(hidden_size),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=int(num_heads),
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: no shapes of a model with attention can be read "
                f"({type(error).__name__}: {error}); give two adapters with --adapter instead"
            ) from error

    def projections(self) -> Projections:
        """The linear layers of attention."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {
            "q_proj": (self.hidden_size, query),
            "k_proj": (self.hidden_size, key),
            "v_proj": (self.hidden_size, key),
            "o_proj": (query, self.hidden_size),
        }
        return {
            f"model.layers.{layer}.self_attn.{name}": size
            for layer in range(self.num_layers)
            for name, size in sizes.items()
        }


def write_adapter(directory: Path, shape: ModelShape, base: str, seed: int, gain: float) -> None:
    """Random weights for a model's attention, as `write_random_adapter` has them."""
    write_random_adapter(directory, shape.projections(), base, seed, gain)


class Workspace:
    """A directory of this run that the server can read, too; it is removed at the end.

    on_server: how the server sees `parent`, if it sees it elsewhere.
    """

    def __init__(self, parent: Path | None = None, on_server: str = "") -> None:
        try:
            self.root = Path(tempfile.mkdtemp(prefix="lora-serve-check-", dir=parent))
        except OSError as error:
            raise ConfigError(f"--workspace {parent}: {error}") from error
        self.root.chmod(0o755)  # the server may run as another user
        self._on_server = Path(on_server) / self.root.name if on_server else self.root.absolute()
        self._numbers = self._count()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def new_place(self) -> Path:
        """A path at which nothing has been yet."""
        return self.root / f"place-{next(self._numbers)}"

    def put(self, version: Path, place: Path, *, is_old: bool = False) -> str:
        """Write a version's files over those at `place`; returns the path for the server.

        is_old: with times of long ago, as a restored backup has them.
        """
        overwrite(place, version)
        if is_old:
            for file in place.iterdir():
                os.utime(file, (OLD_SECONDS, OLD_SECONDS))
        return self.seen(place)

    def put_broken(self, version: Path, place: Path) -> str:
        """A copy whose weights end in the middle, as of a disk that was full."""
        path = self.put(version, place)
        os.truncate(place / WEIGHTS, (place / WEIGHTS).stat().st_size // 2)
        return path

    def seen(self, place: Path) -> str:
        return str(self._on_server / place.relative_to(self.root))

    def copy_adapter(self, source: Path, name: str) -> Path:
        """A version from a directory of the user's. Raises ConfigError if it holds no adapter."""
        target = self.root / name
        if not (source / WEIGHTS).is_file() or not (source / "adapter_config.json").is_file():
            raise ConfigError(
                f"--adapter {source}: want a directory with adapter_config.json and {WEIGHTS}"
            )
        overwrite(target, source)
        return target

    def _count(self) -> Iterator[int]:
        yield from range(1, 1_000_000)
