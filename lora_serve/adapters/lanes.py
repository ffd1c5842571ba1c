"""Lanes of tasks: what is read at a time, and until when. Starts no thread, and reads no file."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.location import AdapterCopy, RemoteAdapter
from lora_serve.errors import AdapterUnavailableError
from lora_serve.identity import AdapterRef
from lora_serve.messages import LoadAdapter

NUM_READS = 4  # of a lane at a time
MAX_HUNG_READS = 8  # of a lane: given up and not ended; with so many, nothing more is read there


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Read the adapter at `path`: for a caller's LoadAdapter, or to bring `ref` back."""

    path: str
    call: LoadAdapter | None = None
    ref: AdapterRef | None = None

    def needs_weights(self, checkpoint: AdapterCheckpoint) -> bool:
        """Whether workers are to prepare what was read.

        Not for a call that only looks at an adapter, nor bytes that are not those of `ref`.
        """
        if self.call is not None:
            return not self.call.is_examined
        return self.ref is not None and self.ref.digest == checkpoint.digest


@dataclass(slots=True, eq=False)
class ReadTask:
    """A job on its way; it is in one lane at a time.

    place: what is read, or downloaded, next. end_lock: who takes it decides what becomes of the
    read: the thread that has read all, or the engine, which gives it up. is_slow: `take_slow` has
    told so.
    """

    job: LoadJob
    place: str | RemoteAdapter | AdapterCopy
    begin: float
    deadline: float = 0.0
    end_lock: threading.Lock = field(default_factory=threading.Lock)
    is_reading: bool = False
    is_given_up: bool = False
    is_slow: bool = False


@dataclass(slots=True)
class Lane:
    """Tasks of one kind.

    queue: those that may begin and have not. timed: all that may still pass their deadline, the
    earliest first. num_hung: reads that were given up and have not ended.
    """

    flag: str
    seconds: float
    queue: deque[ReadTask] = field(default_factory=deque)
    timed: dict[ReadTask, None] = field(default_factory=dict)
    num_reading: int = 0
    num_hung: int = 0

    def add(self, task: ReadTask, now: float) -> None:
        """Start the clock of a task."""
        task.deadline = now + self.seconds
        self.timed[task] = None

    def timeout(self, job: LoadJob) -> AdapterUnavailableError:
        return AdapterUnavailableError(
            f"{job.path} was not read within {self.flag} {self.seconds:g}; see that its disk or "
            "hub answers, and try again"
        )

    def refusal(self, job: LoadJob) -> AdapterUnavailableError:
        return AdapterUnavailableError(
            f"{job.path} was not read: {MAX_HUNG_READS} earlier reads that passed {self.flag} "
            f"{self.seconds:g} have not ended yet; see that their disk or hub answers"
        )
