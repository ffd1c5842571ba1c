"""A loader without files or threads: a path's content is what was put there.

The lanes, deadlines and order of calls are the real loader's. Time is that of the oracle's clock,
and a read ends when the results have been polled often enough, too late, or never.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.loader import AdapterLoader, LoadResult
from lora_serve.adapters.location import AdapterCopy, HubAdapter, RemoteAdapter, S3Adapter
from lora_serve.adapters.source import AdapterSource
from lora_serve.adapters.threads import Work
from lora_serve.config import LoRAConfig
from lora_serve.engine.core.executor import Executor
from lora_serve.errors import AdapterNotFoundError

HUB, BUCKET = "hub/", "s3://"  # what is below them has to be downloaded first
ACTIVATED = "-2"
INVOCATION = (3, 4)
MOST_POLLS = 30  # of a read that is in time, and may be slow
LATE_POLLS = 45  # of the engine's forty in time
DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class ReadFaults:
    """How probable it is that a read never ends, and that it ends long after its deadline."""

    hangs: float
    late: float


def oracle_checkpoint(path: str, content: str) -> AdapterCheckpoint:
    digest = hashlib.sha256(content.encode()).digest()
    return AdapterCheckpoint(
        path, digest, 8, 100, "m", modules=(), invocation_tokens=invocation_of(content)
    )


def invocation_of(content: str) -> tuple[int, ...]:
    """The invocation tokens of an adapter: contents that end so are of an activated LoRA."""
    return INVOCATION if content.endswith(ACTIVATED) else ()


class OracleThreads:
    """Each read takes `delay` polls more than one; with faults, any number, and some never end."""

    def __init__(self, delay: int, faults: ReadFaults | None, rng: Random) -> None:
        self._delay = delay
        self._faults = faults
        self._rng = rng
        self._reads: list[tuple[int, Work]] = []

    def start_read(self, work: Work) -> None:
        faults, delay = self._faults, self._delay
        if faults is not None:
            draw = self._rng.random()
            if draw < faults.hangs:
                return
            delay = self._rng.randrange(MOST_POLLS)
            delay = LATE_POLLS if draw < faults.hangs + faults.late else delay
        self._reads.append((delay, work))

    def prepare(self, work: Work) -> None:
        work()

    def poll(self) -> None:
        due = [work for wait, work in self._reads if wait <= 0]
        self._reads = [(wait - 1, work) for wait, work in self._reads if wait > 0]
        for work in due:
            work()

    def close(self) -> None:
        self._reads.clear()


def _copy_of(adapter: RemoteAdapter, digest: str) -> str:
    return f"/copies/{adapter}/{digest}"


class OracleLoader(AdapterLoader):
    """files: the content of each path."""

    def __init__(
        self,
        config: LoRAConfig,
        executor: Executor,
        clock: Callable[[], float],
        delay: int = 0,
        faults: ReadFaults | None = None,
        rng: Random | None = None,
    ) -> None:
        self.files: dict[str, str] = {}
        self._damage = Random(delay)
        self.threads = OracleThreads(delay, faults, rng or Random(0))
        source = AdapterSource(
            self._read_file, self._download_file, self._read_copy, self._copies_of
        )
        super().__init__(
            config, source, executor.prepare_adapter, lambda: None, self.threads, clock
        )

    def take_results(self) -> list[LoadResult]:
        self.threads.poll()
        return super().take_results()

    def _read_file(self, path: str) -> AdapterCheckpoint | RemoteAdapter:
        if path.startswith(HUB):
            return HubAdapter(path)
        if path.startswith(BUCKET):
            return S3Adapter(path)
        return oracle_checkpoint(path, self._content(path))

    def _download_file(self, adapter: RemoteAdapter) -> str:
        content = self._content(str(adapter))
        path = f"/cache/{adapter}"
        if isinstance(adapter, S3Adapter):
            path = _copy_of(adapter, hashlib.sha256(content.encode()).hexdigest())
        self.files[path] = content
        return path

    def _read_copy(self, copy: AdapterCopy) -> AdapterCheckpoint:
        checkpoint = oracle_checkpoint(copy.directory, self._content(copy.directory))
        if isinstance(copy.origin, S3Adapter):
            return replace(checkpoint, path=copy.origin.uri)
        return checkpoint

    def _copies_of(self, adapter: RemoteAdapter, digest: str) -> list[str]:
        """What was downloaded with this digest, which may be damaged by now."""
        path = _copy_of(adapter, digest)
        if path not in self.files:
            return []
        if self._damage.random() < 0.3:
            self.files[path] = DAMAGED
        return [path]

    def _content(self, path: str) -> str:
        if path not in self.files:
            raise AdapterNotFoundError(f"No adapter found for {path}")
        return self.files[path]
