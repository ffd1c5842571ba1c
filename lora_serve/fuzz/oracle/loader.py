"""A loader without files or threads: a path's content is what was put there."""

from __future__ import annotations

import hashlib

from lora_serve.adapters.loader import LoadJob, LoadResult
from lora_serve.engine.core.executor import Executor
from lora_serve.errors import AdapterNotFoundError
from lora_serve.step import AdapterCheckpoint


def oracle_checkpoint(path: str, content: str) -> AdapterCheckpoint:
    digest = hashlib.sha256(content.encode()).digest()
    return AdapterCheckpoint(path, digest, rank=8, num_bytes=100, base_model="m", modules=())


class OracleLoader:
    """Finishes each job after the results were polled `delay` times, in order."""

    def __init__(self, executor: Executor, delay: int = 0) -> None:
        self.files: dict[str, str] = {}
        self.delay = delay
        self._executor = executor
        self._jobs: list[tuple[int, LoadResult]] = []

    @property
    def num_pending(self) -> int:
        return len(self._jobs)

    def submit(self, job: LoadJob) -> None:
        content = self.files.get(job.path)
        if content is None:
            error = AdapterNotFoundError(f"No adapter found for {job.path}")
            self._jobs.append((self.delay, LoadResult(job, error)))
            return
        checkpoint = oracle_checkpoint(job.path, content)
        self._executor.prepare_adapter(checkpoint)
        self._jobs.append((self.delay, LoadResult(job, checkpoint)))

    def take_results(self) -> list[LoadResult]:
        self._jobs = [(wait - 1, result) for wait, result in self._jobs]
        ready = []
        while self._jobs and self._jobs[0][0] < 0:
            ready.append(self._jobs.pop(0)[1])
        return ready

    def close(self) -> None:
        self._jobs.clear()
