"""Reads adapters in threads: decode never stalls while one loads, and no caller waits for ever.

Loads, reloads of evicted adapters and downloads have a lane each: so many reads at a time, and a
deadline. A read that passes it is given up: its caller gets an error, its thread is left alone, and
what it gives later is thrown away. Calls for one name are read one after another, so that they take
effect in the order in which they came. All state belongs to the engine's thread, which calls
`submit` and `take_results`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.lanes import MAX_HUNG_READS, NUM_READS, Lane, LoadJob, ReadTask
from lora_serve.adapters.location import AdapterCopy, RemoteAdapter
from lora_serve.adapters.source import AdapterSource, make_source
from lora_serve.adapters.threads import AdapterThreads, LoaderThreads
from lora_serve.config import LoRAConfig
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterUnavailableError,
    LoraServeError,
    without_frames,
)
from lora_serve.identity import AdapterRef
from lora_serve.model_info import ModelInfo

logger = logging.getLogger(__name__)

SLOW_SECONDS = 1.0  # a reload that takes longer keeps no LoRA slot
MAX_SLOW = 4  # slow reloads at a time: their weights come back beyond what the slots bound


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a job: a checkpoint whose weights the workers have prepared, or an error.

    Where `job.needs_weights` does not ask for them, they are not prepared.
    """

    job: LoadJob
    outcome: AdapterCheckpoint | LoraServeError


class Loader(Protocol):
    """`AdapterLoader`, or a test's own."""

    @property
    def num_pending(self) -> int:
        """Jobs whose results were not taken yet."""

    @property
    def next_due(self) -> float | None:
        """When `take_results` or `take_slow` may have more to say without being notified."""

    @property
    def num_timeouts(self) -> int:
        """Jobs that were given up at their deadline."""

    @property
    def num_late(self) -> int:
        """Reads that ended after they had been given up, and were thrown away."""

    def submit(self, job: LoadJob) -> None: ...

    def take_results(self) -> list[LoadResult]: ...

    def take_slow(self) -> list[AdapterRef]:
        """Reloads that have been under way for SLOW_SECONDS, each once, at most MAX_SLOW."""

    def close(self) -> None: ...


Outcome = AdapterCheckpoint | RemoteAdapter | AdapterCopy | LoraServeError
Got = TypeVar("Got")


def make_loader(
    config: LoRAConfig,
    model: ModelInfo,
    prepare: Callable[[AdapterCheckpoint], None],
    notify: Callable[[], None],
) -> AdapterLoader:
    """A loader of checkpoints that fit this model and these limits."""
    return AdapterLoader(config, make_source(config, model), prepare, notify, AdapterThreads())


class AdapterLoader:
    """`notify` is called from threads when there may be results."""

    def __init__(
        self,
        config: LoRAConfig,
        source: AdapterSource,
        prepare: Callable[[AdapterCheckpoint], None],
        notify: Callable[[], None],
        threads: LoaderThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._prepare = prepare
        self._notify = notify
        self._threads = threads
        self._clock = clock
        self._loads = Lane("--lora-load-timeout", config.lora_load_timeout)
        self._reloads = Lane("--lora-reload-timeout", config.lora_reload_timeout)
        self._downloads = Lane("--lora-download-timeout", config.lora_download_timeout)
        self._calls: dict[str, deque[ReadTask]] = {}  # by name, in the order in which they came
        self._unended_reloads: dict[ReadTask, None] = {}  # oldest first
        self._ended: queue.SimpleQueue[tuple[Lane, ReadTask, Outcome]] = queue.SimpleQueue()
        self._results: list[LoadResult] = []
        self._num_pending = 0
        self.num_timeouts = 0
        self.num_late = 0

    @property
    def num_pending(self) -> int:
        return self._num_pending

    @property
    def next_due(self) -> float | None:
        tasks = [next(iter(lane.timed)) for lane in self._lanes if lane.timed]
        due = [task.deadline for task in tasks]
        if self._num_slow < MAX_SLOW:
            swift = (task for task in self._unended_reloads if not task.is_slow)
            due += [task.begin + SLOW_SECONDS for task in [next(swift, None)] if task is not None]
        return min(due, default=None)

    def submit(self, job: LoadJob) -> None:
        self._num_pending += 1
        now = self._clock()
        task = ReadTask(job, job.path, now)
        if job.call is None:
            self._unended_reloads[task] = None
            self._reloads.add(task, now)
            self._reloads.queue.append(task)
        else:
            calls = self._calls.setdefault(job.call.lora_name, deque())
            calls.append(task)
            self._loads.add(task, now)
            if len(calls) == 1:
                self._loads.queue.append(task)
        self._start_reads()

    def take_results(self) -> list[LoadResult]:
        """All results so far, oldest first. Never waits."""
        if not self._num_pending and self._ended.empty():
            return []  # as between most steps
        while not self._ended.empty():  # no other thread takes any out
            self._take_in(*self._ended.get_nowait())
        self._give_up_overdue()
        self._start_reads()
        results, self._results = self._results, []
        self._num_pending -= len(results)
        return results

    def take_slow(self) -> list[AdapterRef]:
        if not self._unended_reloads:
            return []
        now, slow = self._clock(), []
        for task in self._unended_reloads:
            if self._num_slow >= MAX_SLOW or now < task.begin + SLOW_SECONDS:
                break
            if not task.is_slow and task.job.ref is not None:
                task.is_slow = True
                slow.append(task.job.ref)
        return slow

    def close(self) -> None:
        for lane in self._lanes:
            lane.queue.clear()
        self._threads.close()

    # ── the engine's thread ─────────────────────────────────────────────────────────────────

    @property
    def _lanes(self) -> tuple[Lane, ...]:
        return self._loads, self._reloads, self._downloads

    @property
    def _num_slow(self) -> int:
        return sum(task.is_slow for task in self._unended_reloads)

    def _take_in(self, lane: Lane, task: ReadTask, outcome: Outcome) -> None:
        if task.is_given_up:
            lane.num_hung -= 1
            self.num_late += 1
            return
        lane.num_reading -= 1
        lane.timed.pop(task, None)
        task.is_reading = False
        if isinstance(outcome, AdapterCheckpoint | LoraServeError):
            self._end(task, outcome)
            return
        task.place = outcome
        reads = self._reloads if task.job.call is None else self._loads
        following = reads if isinstance(outcome, AdapterCopy) else self._downloads
        following.add(task, self._clock())
        following.queue.append(task)

    def _give_up_overdue(self) -> None:
        now = self._clock()
        for lane in self._lanes:
            while lane.timed and (task := next(iter(lane.timed))).deadline <= now:
                del lane.timed[task]
                if task.end_lock.acquire(blocking=False):  # else it was read, and will end
                    self._give_up(lane, task)

    def _give_up(self, lane: Lane, task: ReadTask) -> None:
        task.is_given_up = True
        self.num_timeouts += 1
        if task.is_reading:
            lane.num_reading -= 1
            lane.num_hung += 1
        elif task in lane.queue:
            lane.queue.remove(task)
        self._end(task, lane.timeout(task.job))

    def _start_reads(self) -> None:
        for lane in reversed(self._lanes):  # the end of a download may let a load begin
            while lane.queue and lane.num_reading < NUM_READS:
                task = lane.queue.popleft()
                if lane.num_hung < MAX_HUNG_READS:
                    self._start_read(lane, task)
                else:
                    del lane.timed[task]
                    self._end(task, lane.refusal(task.job))

    def _start_read(self, lane: Lane, task: ReadTask) -> None:
        lane.num_reading += 1
        task.is_reading = True
        try:
            self._threads.start_read(partial(self._read, lane, task))
        except RuntimeError as error:  # the system has no more threads
            self._take_in(lane, task, AdapterUnavailableError(f"{task.job.path}: {error}"))

    def _end(self, task: ReadTask, outcome: AdapterCheckpoint | LoraServeError) -> None:
        self._results.append(LoadResult(task.job, outcome))
        self._unended_reloads.pop(task, None)
        if task.job.call is not None:
            self._end_call(task, task.job.call.lora_name)

    def _end_call(self, task: ReadTask, name: str) -> None:
        """Let the next call of this name begin."""
        calls = self._calls[name]
        was_first = calls[0] is task
        calls.remove(task)
        if not calls:
            del self._calls[name]
        elif was_first:
            self._loads.queue.append(calls[0])

    # ── the threads ─────────────────────────────────────────────────────────────────────────

    def _read(self, lane: Lane, task: ReadTask) -> None:
        get = partial(self._source.get, task.place, _wanted_digest(task.job))
        outcome = _guarded(task.job.path, get)
        if isinstance(outcome, AdapterCheckpoint):
            outcome = _of_digest(outcome, task.job)
        if isinstance(outcome, AdapterCheckpoint):
            if not task.end_lock.acquire(blocking=False):
                outcome = AdapterUnavailableError("read too late")  # its bytes are freed here
            elif task.job.needs_weights(outcome):
                self._threads.prepare(partial(self._prepare_and_tell, lane, task, outcome))
                return
        self._tell(lane, task, outcome)

    def _prepare_and_tell(self, lane: Lane, task: ReadTask, checkpoint: AdapterCheckpoint) -> None:
        def prepare() -> AdapterCheckpoint:
            self._prepare(checkpoint)
            return checkpoint

        self._tell(lane, task, _guarded(task.job.path, prepare))

    def _tell(self, lane: Lane, task: ReadTask, outcome: Outcome) -> None:
        self._ended.put((lane, task, outcome))
        self._notify()


def _wanted_digest(job: LoadJob) -> str:
    if job.call is not None:
        return job.call.digest
    return job.ref.digest.hex() if job.ref is not None else ""


def _of_digest(checkpoint: AdapterCheckpoint, job: LoadJob) -> AdapterCheckpoint | AdapterError:
    """The checkpoint, or a refusal if its caller has asked for another digest."""
    wanted, found = _wanted_digest(job), checkpoint.digest.hex()
    if job.call is None or wanted in ("", found):
        return checkpoint
    return AdapterChangedError(
        f"{job.path} has the digest {found}, not the one that was asked for, {wanted}; load the "
        "files that have it, or leave `digest` out",
        "digest",
        found_digest=found,
    )


def _guarded(path: str, act: Callable[[], Got]) -> Got | LoraServeError:
    try:
        return act()
    except LoraServeError as error:
        return without_frames(error)
    except MemoryError:
        return AdapterUnavailableError(f"{path} could not be loaded: there is not enough memory")
    except Exception as error:  # a bug of ours must not end the thread: it would hang callers
        logger.exception("loading the adapter at %s failed", path)
        return AdapterError(f"{path}: could not be loaded: {error}")
