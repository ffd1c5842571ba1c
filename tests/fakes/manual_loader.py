"""A loader of adapters whose jobs end when a test says so."""

from __future__ import annotations

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.lanes import LoadJob
from lora_serve.adapters.loader import LoadResult
from lora_serve.errors import LoraServeError
from lora_serve.identity import AdapterRef


class ManualLoader:
    """jobs: those that have not ended, oldest first."""

    def __init__(self) -> None:
        self.jobs: list[LoadJob] = []
        self._results: list[LoadResult] = []

    @property
    def num_pending(self) -> int:
        return len(self.jobs) + len(self._results)

    @property
    def next_due(self) -> float | None:
        return None

    @property
    def num_timeouts(self) -> int:
        return 0

    @property
    def num_late(self) -> int:
        return 0

    def submit(self, job: LoadJob) -> None:
        self.jobs.append(job)

    def finish(self, ref: AdapterRef, outcome: AdapterCheckpoint | LoraServeError) -> None:
        """End the job that brings `ref` back."""
        (job,) = (job for job in self.jobs if job.ref == ref)
        self.jobs.remove(job)
        self.end(LoadResult(job, outcome))

    def end(self, result: LoadResult) -> None:
        """Tell of a job that is not among `jobs` any more."""
        self._results.append(result)

    def take_results(self) -> list[LoadResult]:
        results, self._results = self._results, []
        return results

    def take_slow(self) -> list[AdapterRef]:
        return []

    def close(self) -> None:
        self.jobs.clear()
