"""Reads adapters in a thread of its own, so that decode never stalls while one loads.

Jobs go in and results come out through queues; jobs run one after another, so adapters are
published in the order in which they were asked for.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.adapters.location import resolve_adapter_path
from lora_serve.config import LoRAConfig
from lora_serve.errors import AdapterError, LoraServeError
from lora_serve.identity import AdapterRef
from lora_serve.messages import LoadAdapter
from lora_serve.step import AdapterCheckpoint, ModelInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Read the adapter at `path`: for a caller's LoadAdapter, or to bring `ref` back."""

    path: str
    call: LoadAdapter | None = None
    ref: AdapterRef | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a job: a checkpoint whose weights the workers have prepared, or an error.

    The weights of a reload whose digest is not the one of `job.ref` are not prepared.
    """

    job: LoadJob
    outcome: AdapterCheckpoint | LoraServeError


class Loader(Protocol):
    """`AdapterLoader`, or a test's own."""

    @property
    def num_pending(self) -> int:
        """Jobs whose results were not taken yet."""

    def submit(self, job: LoadJob) -> None: ...

    def take_results(self) -> list[LoadResult]: ...

    def close(self) -> None: ...


def make_loader(
    config: LoRAConfig,
    model: ModelInfo,
    prepare: Callable[[AdapterCheckpoint], None],
    notify: Callable[[], None],
) -> AdapterLoader:
    """A loader of checkpoints that fit this model and these limits."""

    def read(path: str) -> AdapterCheckpoint:
        return read_adapter(
            resolve_adapter_path(path, config.lora_allowed_roots),
            lora_modules=model.lora_modules,
            max_lora_rank=config.max_lora_rank,
            allowed_roots=config.lora_allowed_roots,
        )

    return AdapterLoader(read, prepare, notify)


class AdapterLoader:
    """One thread. `notify` is called from it after each result."""

    def __init__(
        self,
        read: Callable[[str], AdapterCheckpoint],
        prepare: Callable[[AdapterCheckpoint], None],
        notify: Callable[[], None],
    ) -> None:
        self._read = read
        self._prepare = prepare
        self._notify = notify
        self._jobs: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._num_pending = 0
        self._thread = threading.Thread(target=self._run, name="adapter-loader", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, job: LoadJob) -> None:
        self._num_pending += 1
        self._jobs.put(job)

    def take_results(self) -> list[LoadResult]:
        """All results so far, oldest first. Never waits."""
        results: list[LoadResult] = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
                self._num_pending -= len(results)
                return results

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._results.put(self._load(job))
            self._notify()

    def _load(self, job: LoadJob) -> LoadResult:
        try:
            checkpoint = self._read(job.path)
            if job.ref is None or job.ref.digest == checkpoint.digest:
                self._prepare(checkpoint)
            return LoadResult(job, checkpoint)
        except LoraServeError as error:
            return LoadResult(job, error)
        except Exception as error:  # a bug of ours must not end the thread: it would hang callers
            logger.exception("loading the adapter at %s failed", job.path)
            return LoadResult(job, AdapterError(f"{job.path}: could not be loaded: {error}"))
