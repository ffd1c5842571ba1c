from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.lanes import MAX_HUNG_READS, NUM_READS, LoadJob
from lora_serve.adapters.loader import (
    MAX_SLOW,
    SLOW_SECONDS,
    AdapterLoader,
    LoadResult,
    make_loader,
)
from lora_serve.adapters.location import AdapterCopy, HubAdapter
from lora_serve.adapters.source import AdapterSource
from lora_serve.adapters.threads import AdapterThreads, Work
from lora_serve.config import LoRAConfig
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterUnavailableError,
)
from lora_serve.fuzz.oracle.executor import oracle_model
from lora_serve.fuzz.oracle.loader import oracle_checkpoint
from lora_serve.identity import AdapterRef
from lora_serve.messages import LoadAdapter

CONFIG = LoRAConfig(
    enable_lora=True, lora_load_timeout=20.0, lora_reload_timeout=10.0, lora_download_timeout=50.0
)


@dataclass
class ManualThreads:
    """Reads that run when a test says so. has_threads: whether the system gives more."""

    reads: deque[Work] = field(default_factory=deque)
    has_threads: bool = True

    def start_read(self, work: Work) -> None:
        if not self.has_threads:
            raise RuntimeError("can't start new thread")
        self.reads.append(work)

    def prepare(self, work: Work) -> None:
        work()

    def close(self) -> None:
        """Nothing runs by itself."""


class Books:
    """A loader whose reads and time a test drives, and what it has prepared."""

    def __init__(self) -> None:
        self.now = 0.0
        self.threads = ManualThreads()
        self.prepared: list[bytes] = []
        source = AdapterSource(
            _read,
            lambda adapter: f"/cache/{adapter.repo_id}",
            _read_copy,
        )
        self.loader = AdapterLoader(
            CONFIG,
            source,
            lambda checkpoint: self.prepared.append(checkpoint.digest),
            lambda: None,
            self.threads,
            lambda: self.now,
        )

    def load(self, name: str, path: str) -> None:
        self.loader.submit(LoadJob(path, call=LoadAdapter(0, name, path)))

    def reload(self, name: str, path: str) -> AdapterRef:
        ref = AdapterRef(name, digest_of(path))
        self.loader.submit(LoadJob(path, ref=ref))
        return ref

    def finish(self, index: int = 0) -> None:
        """One of the reads that have begun ends."""
        work = self.threads.reads[index]
        del self.threads.reads[index]
        work()

    def results(self, after_seconds: float = 0.0) -> list[tuple[str, type]]:
        self.now += after_seconds
        return [(result.job.path, type(result.outcome)) for result in self.loader.take_results()]


def _read(path: str) -> AdapterCheckpoint | HubAdapter:
    match path:
        case "/missing":
            raise AdapterNotFoundError("No adapter found for /missing")
        case "/bug":
            raise ZeroDivisionError("a bug")
        case "/large":
            raise MemoryError
        case "org/name":
            return HubAdapter(path)
    return oracle_checkpoint(path, path)


def _read_copy(copy: AdapterCopy) -> AdapterCheckpoint:
    return oracle_checkpoint(copy.directory, copy.directory)


def digest_of(path: str) -> bytes:
    return oracle_checkpoint(path, path).digest


@pytest.fixture
def books() -> Books:
    return Books()


def test_what_is_read_is_prepared_and_told(books: Books) -> None:
    books.load("a", "/a")
    books.load("b", "/b")
    assert books.results() == []
    books.finish()
    books.finish()
    assert books.results() == [("/a", AdapterCheckpoint), ("/b", AdapterCheckpoint)]
    assert books.prepared == [digest_of("/a"), digest_of("/b")]
    assert books.loader.num_pending == 0
    assert books.loader.next_due is None


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/missing", AdapterNotFoundError, "No adapter found"),
        ("/bug", AdapterError, "/bug: could not be loaded: a bug"),
        ("/large", AdapterUnavailableError, "there is not enough memory"),
    ],
)
def test_a_read_that_fails_is_told(
    books: Books, path: str, error: type[Exception], message: str
) -> None:
    books.load("a", path)
    books.finish()
    (result,) = books.loader.take_results()
    assert type(result.outcome) is error
    assert message in str(result.outcome)


class Buffer(bytearray):
    """What a read holds, and can be watched."""


def test_an_error_keeps_nothing_alive_of_what_was_read() -> None:
    buffers = []

    def read(path: str) -> AdapterCheckpoint:
        buffer = Buffer()
        buffers.append(weakref.ref(buffer))
        try:
            raise ValueError("it is not finite")
        except ValueError as error:
            raise AdapterFormatError(path, [str(error)]) from error

    threads = ManualThreads()
    source = AdapterSource(read, lambda adapter: "", _read_copy)
    loader = AdapterLoader(CONFIG, source, lambda checkpoint: None, lambda: None, threads)
    loader.submit(LoadJob("/a", call=LoadAdapter(0, "a", "/a")))
    threads.reads.popleft()()
    (result,) = loader.take_results()
    assert "it is not finite" in str(result.outcome)
    assert [buffer() for buffer in buffers] == [None]


def test_weights_for_which_there_is_no_memory_are_an_error_of_their_load() -> None:
    def prepare(checkpoint: AdapterCheckpoint) -> None:
        raise MemoryError

    threads = ManualThreads()
    source = AdapterSource(_read, lambda adapter: "", _read_copy)
    loader = AdapterLoader(CONFIG, source, prepare, lambda: None, threads)
    loader.submit(LoadJob("/a", call=LoadAdapter(0, "a", "/a")))
    threads.reads.popleft()()
    (result,) = loader.take_results()
    assert isinstance(result.outcome, AdapterUnavailableError)
    assert str(result.outcome) == "/a could not be loaded: there is not enough memory"


def test_a_system_without_threads_is_an_error_of_the_load(books: Books) -> None:
    books.threads.has_threads = False
    books.load("a", "/a")
    assert books.results() == [("/a", AdapterUnavailableError)]


def test_a_reload_of_changed_files_prepares_nothing(books: Books) -> None:
    books.loader.submit(LoadJob("/a", ref=AdapterRef("a", b"another digest")))
    books.finish()
    assert books.results() == [("/a", AdapterCheckpoint)]
    assert books.prepared == []


def test_a_call_for_a_digest_that_the_files_do_not_have_prepares_nothing(books: Books) -> None:
    kinds = []
    for digest in (digest_of("/b"), digest_of("/a")):
        call = LoadAdapter(0, "a", "/a", digest=digest.hex())
        books.loader.submit(LoadJob("/a", call=call))
        books.finish()
        kinds += [kind for _, kind in books.results()]
    assert kinds == [AdapterChangedError, AdapterCheckpoint]
    assert books.prepared == [digest_of("/a")]


def test_a_download_is_followed_by_a_read(books: Books) -> None:
    books.load("a", "org/name")
    for _ in range(3):  # it is on the hub; the download; the read
        assert books.results() == []
        books.finish()
    (result,) = books.loader.take_results()
    assert isinstance(result.outcome, AdapterCheckpoint)
    assert result.outcome.path == "/cache/org/name"


def test_an_evicted_adapter_that_is_downloaded_again_has_the_time_of_a_download(
    books: Books,
) -> None:
    """And its files are read in the lane of reloads, beside which loads go on."""
    books.reload("a", "org/name")
    books.finish()  # it is on the hub
    assert books.results(after_seconds=CONFIG.lora_reload_timeout - 1) == []
    assert books.results(after_seconds=CONFIG.lora_download_timeout - 1) == []
    books.finish()
    assert books.results() == []
    assert books.results(after_seconds=CONFIG.lora_reload_timeout + 1) == [
        ("org/name", AdapterUnavailableError)
    ]


@pytest.mark.parametrize(
    ("flags", "is_asked"),
    [
        ({}, False),
        ({"lora_allow_hub": True}, True),
        ({"lora_modules": ("a=org/name",)}, True),
        ({"lora_modules": ("a=org/other",)}, False),
    ],
)
def test_the_hub_is_asked_for_what_the_operator_named_or_allowed(
    flags: dict[str, Any], is_asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def download(adapter: HubAdapter, *limits: int) -> str:
        asked.append((adapter, *limits))
        return str(tmp_path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lora_serve.adapters.remote.download_from_hub", download)
    config = LoRAConfig(
        enable_lora=True, lora_max_download_bytes=7, lora_hub_cache_bytes=9, **flags
    )
    loader = make_loader(config, oracle_model(1), lambda checkpoint: None, lambda: None)
    loader.submit(LoadJob("org/name", call=LoadAdapter(0, "a", "org/name")))
    (result,) = eventually(loader.take_results)
    loader.close()
    assert asked == [(HubAdapter("org/name"), 7, 9)] * is_asked
    assert isinstance(result.outcome, AdapterNotFoundError)  # the directory is empty
    assert ("--lora-allow-hub" in str(result.outcome)) != is_asked


# ── deadlines ───────────────────────────────────────────────────────────────────────────────


def test_a_read_that_hangs_ends_at_its_deadline_and_holds_up_no_other(books: Books) -> None:
    books.load("hangs", "/hangs")
    books.load("a", "/a")
    books.reload("b", "/b")
    books.finish(1)
    books.finish(1)
    assert books.results() == [("/a", AdapterCheckpoint), ("/b", AdapterCheckpoint)]
    assert books.loader.next_due == 20.0
    assert books.results(after_seconds=19.9) == []
    books.now = 20.0
    (result,) = books.loader.take_results()
    assert str(result.outcome) == (
        "/hangs was not read within --lora-load-timeout 20; see that its disk or hub answers, and "
        "try again"
    )
    assert books.loader.num_timeouts == 1


def test_what_is_read_after_the_deadline_is_thrown_away_and_counted(books: Books) -> None:
    books.load("a", "/a")
    assert books.results(after_seconds=20.0) == [("/a", AdapterUnavailableError)]
    books.finish()
    assert books.results() == []
    assert books.prepared == []
    assert books.loader.num_late == 1


def test_what_was_read_in_time_takes_effect_though_it_is_told_after_the_deadline(
    books: Books,
) -> None:
    books.load("a", "/a")
    books.finish()
    assert books.results(after_seconds=100.0) == [("/a", AdapterCheckpoint)]


def test_a_call_waits_for_those_before_it_of_the_same_name(books: Books) -> None:
    books.load("a", "org/name")
    books.load("a", "/other")
    books.load("b", "/b")
    assert len(books.threads.reads) == 2
    books.finish(1)
    assert books.results() == [("/b", AdapterCheckpoint)]
    for _ in range(3):
        books.finish()
        results = books.results()
    assert results == [("org/name", AdapterCheckpoint)]
    books.finish()
    assert books.results() == [("/other", AdapterCheckpoint)]


def test_a_call_goes_on_when_the_one_before_it_has_been_given_up(books: Books) -> None:
    books.load("a", "/hangs")
    books.results(after_seconds=10.0)
    books.load("a", "/a")
    assert books.results(after_seconds=10.0) == [("/hangs", AdapterUnavailableError)]
    books.finish(1)
    assert books.results() == [("/a", AdapterCheckpoint)]


def test_each_stage_has_the_time_of_its_lane(books: Books) -> None:
    books.load("a", "org/name")
    books.finish()
    books.results()
    assert books.results(after_seconds=49.0) == []
    assert books.results(after_seconds=1.0) == [("org/name", AdapterUnavailableError)]


def test_so_many_reads_run_at_a_time(books: Books) -> None:
    for number in range(NUM_READS + 2):
        books.load(f"{number}", f"/{number}")
    assert len(books.threads.reads) == NUM_READS
    books.finish()
    books.results()
    assert len(books.threads.reads) == NUM_READS


def test_reads_that_hang_are_bounded_and_further_ones_refused_at_once(books: Books) -> None:
    for number in range(3 * MAX_HUNG_READS):
        books.load(f"{number}", f"/{number}")
        books.results(after_seconds=20.0)
    assert len(books.threads.reads) == MAX_HUNG_READS
    books.load("last", "/last")
    (result,) = books.loader.take_results()
    assert "8 earlier reads that passed --lora-load-timeout 20 have not ended" in str(
        result.outcome
    )
    books.reload("a", "/a")
    books.finish(MAX_HUNG_READS)
    assert books.results() == [("/a", AdapterCheckpoint)]
    books.finish()  # one of those that hung
    books.load("last", "/last")
    books.results()
    books.load("last", "/last")
    books.finish(-1)
    assert ("/last", AdapterCheckpoint) in books.results()


# ── slow reloads ────────────────────────────────────────────────────────────────────────────


def test_a_reload_that_takes_long_is_told_once(books: Books) -> None:
    ref = books.reload("a", "/a")
    assert books.loader.next_due == SLOW_SECONDS
    assert books.loader.take_slow() == []
    books.now = SLOW_SECONDS
    assert books.loader.take_slow() == [ref]
    assert books.loader.take_slow() == []
    assert books.loader.next_due == 10.0


def test_only_so_many_reloads_are_slow_at_a_time(books: Books) -> None:
    refs = [books.reload(f"{number}", f"/{number}") for number in range(MAX_SLOW + 1)]
    books.now = 2 * SLOW_SECONDS
    assert books.loader.take_slow() == refs[:MAX_SLOW]
    books.finish()
    books.results()
    assert books.loader.take_slow() == refs[MAX_SLOW:]


# ── real threads ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """What the reads of /hangs wait for."""
    event = threading.Event()
    yield event
    event.set()


def eventually(take: Callable[[], list[LoadResult]]) -> list[LoadResult]:
    deadline = time.monotonic() + 10
    while not (results := take()):
        assert time.monotonic() < deadline, "not within 10 s"
        time.sleep(0.01)
    return results


def test_a_thread_that_hangs_holds_up_no_other_and_not_the_end(hanging: threading.Event) -> None:
    def read(path: str) -> AdapterCheckpoint:
        if path == "/hangs":
            hanging.wait()
        return oracle_checkpoint(path, path)

    config = LoRAConfig(enable_lora=True, lora_load_timeout=0.2)
    prepared: list[bytes] = []
    loader = AdapterLoader(
        config,
        AdapterSource(read, lambda adapter: "", _read_copy),
        lambda checkpoint: prepared.append(checkpoint.digest),
        lambda: None,
        AdapterThreads(),
    )
    for name in ("hangs", "a"):
        loader.submit(LoadJob(f"/{name}", call=LoadAdapter(0, name, f"/{name}")))
    (first,) = eventually(loader.take_results)
    (second,) = eventually(loader.take_results)
    assert isinstance(first.outcome, AdapterCheckpoint)
    assert isinstance(second.outcome, AdapterUnavailableError)
    assert prepared == [digest_of("/a")]
    loader.close()
