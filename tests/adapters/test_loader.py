from __future__ import annotations

import threading

from lora_serve.adapters.loader import AdapterLoader, LoadJob, LoadResult
from lora_serve.errors import AdapterError, AdapterNotFoundError
from lora_serve.fuzz.oracle.loader import oracle_checkpoint
from lora_serve.identity import AdapterRef
from lora_serve.step import AdapterCheckpoint


def run_jobs(*jobs: LoadJob) -> tuple[list[LoadResult], list[bytes]]:
    """All results, and the digests that were prepared, in order."""
    prepared: list[bytes] = []
    ended = threading.Semaphore(0)

    def read(path: str) -> AdapterCheckpoint:
        if path == "/missing":
            raise AdapterNotFoundError("No adapter found for /missing")
        if path == "/bug":
            raise ZeroDivisionError("a bug")
        return oracle_checkpoint(path, path)

    loader = AdapterLoader(read, lambda c: prepared.append(c.digest), ended.release)
    for job in jobs:
        loader.submit(job)
    for _ in jobs:
        assert ended.acquire(timeout=5)
    assert loader.num_pending == len(jobs)
    results = loader.take_results()
    assert loader.num_pending == 0
    loader.close()
    return results, prepared


def test_jobs_end_in_the_order_in_which_they_came() -> None:
    results, prepared = run_jobs(LoadJob("/a"), LoadJob("/b"))
    assert [result.job.path for result in results] == ["/a", "/b"]
    assert prepared == [oracle_checkpoint("/a", "/a").digest, oracle_checkpoint("/b", "/b").digest]


def test_a_failing_job_is_told_and_the_next_one_runs() -> None:
    results, _ = run_jobs(LoadJob("/missing"), LoadJob("/bug"), LoadJob("/a"))
    assert isinstance(results[0].outcome, AdapterNotFoundError)
    assert type(results[1].outcome) is AdapterError
    assert isinstance(results[2].outcome, AdapterCheckpoint)


def test_a_reload_of_changed_files_prepares_nothing() -> None:
    ref = AdapterRef("a", b"another digest")
    results, prepared = run_jobs(LoadJob("/a", ref=ref))
    assert isinstance(results[0].outcome, AdapterCheckpoint)
    assert prepared == []
