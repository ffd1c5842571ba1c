"""Adapters that came in bodies, as directories of the server's own that an engine reads.

An engine reads them as any other: also again after it was evicted, or started anew. So their files
stay as long as a name or a request has them, and no longer than the server.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import BinaryIO

import msgspec

from lora_serve.config import EngineConfig
from lora_serve.errors import AdapterUnavailableError
from lora_serve.private_directory import PrivateDirectory
from lora_serve.server.admin.adapter_tensors import Tensors, write_safetensors

_PREFIX = "lora-serve-adapters-"
_CONFIG_NAME, _WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"


class AdapterSpool:
    """Made where it is first asked for its path. Any thread may call it."""

    def __init__(self, max_bytes: int, parent: Path | None = None) -> None:
        """parent: of its directory; the system's place for temporary files if left out."""
        self._max_bytes = max_bytes
        self._parent = parent
        self._directory: PrivateDirectory | None = None
        self._lock = threading.Lock()
        self._num_bytes: dict[str, int] = {}  # by path
        self._loading: set[str] = set()  # paths that no registry may know yet
        self._numbers = count(1)

    @property
    def path(self) -> str:
        with self._lock:
            if self._directory is None:
                parent = self._parent or Path(tempfile.gettempdir())
                self._directory = PrivateDirectory(_PREFIX, parent.resolve())
            return str(self._directory.path)

    def write(self, config: Mapping[str, object], tensors: Tensors) -> str:
        """Write an adapter; returns its path, which stays until it is `settled`, and `removed`.

        Raises:
            AdapterUnavailableError: there is no room for it.
        """
        encoded = msgspec.json.encode(config)
        num_bytes = len(encoded) + sum(tensor.num_bytes for tensor in tensors.values())
        path = self._reserve(num_bytes)
        try:
            os.mkdir(path, 0o700)
            with _new_file(path, _CONFIG_NAME) as file:
                file.write(encoded)
            with _new_file(path, _WEIGHTS_NAME) as file:
                write_safetensors(tensors, file)
        except BaseException as error:
            self.settle(path)
            self.remove([path])
            if isinstance(error, OSError):
                raise AdapterUnavailableError(
                    f"the adapter's {num_bytes} bytes could not be written to the directory for "
                    f"temporary files: {error.strerror}; make room there, or set TMPDIR"
                ) from error
            raise
        return path

    def settle(self, path: str) -> None:
        """Note that its load has ended: it stays as long as it is in use."""
        with self._lock:
            self._loading.discard(path)

    @property
    def settled(self) -> frozenset[str]:
        """Paths whose loads have ended."""
        with self._lock:
            return frozenset(self._num_bytes.keys() - self._loading)

    def remove(self, paths: Collection[str]) -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
            with self._lock:
                self._num_bytes.pop(path, None)

    def close(self) -> None:
        """Remove everything."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _reserve(self, num_bytes: int) -> str:
        path = os.path.join(self.path, str(next(self._numbers)))
        with self._lock:
            num_held = sum(self._num_bytes.values())
            if num_held + num_bytes > self._max_bytes:
                raise AdapterUnavailableError(
                    f"adapters that came in bodies have {num_held} bytes of files; {num_bytes} "
                    f"more are above --max-lora-spool-bytes {self._max_bytes}: unload some, or "
                    "raise it"
                )
            self._num_bytes[path] = num_bytes
            self._loading.add(path)
        return path


def _new_file(directory: str, name: str) -> BinaryIO:
    path = os.path.join(directory, name)
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
    )


def reading_spool(config: EngineConfig, spool: AdapterSpool) -> EngineConfig:
    """An engine that may read what the server itself wrote, where it may not read everything."""
    roots = config.lora.lora_allowed_roots
    if not roots:
        return config
    return replace(config, lora=replace(config.lora, lora_allowed_roots=(*roots, spool.path)))
