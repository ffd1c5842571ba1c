"""Ranks that do not come, or are killed or stopped: told of, and not waited for without an end."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import (
    CacheConfig,
    EngineConfig,
    LimitsConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
)
from lora_serve.distributed import shared_memory
from lora_serve.distributed.limits import RankLimits, TimeLimit
from lora_serve.distributed.link import new_link
from lora_serve.errors import ConfigError, RankLostError
from lora_serve.identity import BASE_MODEL
from lora_serve.models.source import load_spec
from lora_serve.observability.lost_threads import EXIT_CODE_OF_LOST_THREAD
from lora_serve.ops.cpu.threads import default_num_threads
from lora_serve.ops.select import available_ops
from lora_serve.step import SchedulerOutput
from lora_serve.worker import late_ranks, rank_process, rank_server, rank_start
from lora_serve.worker.rank_executor import RankExecutor, told_by_ranks
from lora_serve.worker.rank_server import RankLinks
from lora_serve.worker.rank_start import RankProcesses, start_ranks
from lora_serve.worker.worker import Worker
from tests.e2e.processes import pids_below
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.rank_lives import GREEDY, chunk
from tests.fakes.ranks import LIMIT, LIMITS, SECONDS, make_rank, start_threads
from tests.fakes.tiny_models import ALL_MODELS, ONE_LAYER, save

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ALL_MODELS[ONE_LAYER].make(), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterCheckpoint:
    peft = make_peft(ONE_LAYER, seed=1)
    return read_saved(peft, tmp_path_factory.mktemp("adapter"), load_spec(model))


def of_two_ranks(model: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), cpu_threads=1),
        cache=CacheConfig(num_gpu_blocks_override=16),
        lora=LoRAConfig(enable_lora=True, max_loras=1),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )


@pytest.mark.skipif(default_num_threads() < 2, reason="two ranks need two cores")
def test_a_process_that_ends_at_its_start_is_told_of(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_process.sys, "executable", shutil.which("false"))
    with pytest.raises(RankLostError, match="rank 1"):
        start_ranks(of_two_ranks(model)).load()


def test_a_rank_ends_before_its_imports_if_its_parent_is_gone() -> None:
    """Imports take seconds, in which a server that is stopped would leave it behind."""
    command = (sys.executable, "-X", "importtime", "-c", rank_process._PROGRAM, "1", "3", "4")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 1
    assert "ctypes" in ended.stderr
    assert "lora_serve" not in ended.stderr.partition("ctypes")[2]


def test_no_process_is_started_of_more_ranks_than_cores(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may have looked before: a replica's machine is another than that of its settings."""
    monkeypatch.setattr(rank_start, "RankProcesses", None)
    parallel = ParallelConfig(tensor_parallel_size=1000)
    with pytest.raises(ConfigError, match=r"^--tensor-parallel-size 1000 is above the \d+ cores"):
        start_ranks(replace(of_two_ranks(model), parallel=parallel))


def test_a_rank_that_hangs_at_its_start_is_not_waited_for_for_ever(model: Path) -> None:
    def hang(worker: Worker, links: RankLinks) -> None:
        links.steps.receive(LIMIT)

    limits = RankLimits(LIMIT, TimeLimit(0.2, "--engine-ready-timeout"))
    with pytest.raises(RankLostError, match=r"in 0.2 s; raise --engine-ready-timeout if it may"):
        start_threads(2, lambda group: make_rank(model, group), hang, limits).load()


def test_ranks_leave_no_directory_however_they_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that meet in memory need none; the next ones remove that of an engine that was killed.

    A lock that is free is what its owner's end leaves.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    in_memory = of_two_ranks(model)
    ranks = RankProcesses(in_memory)
    assert [*tmp_path.iterdir()] == []
    ranks.close()
    parallel = replace(in_memory.parallel, tensor_parallel_backend="gloo")
    by_files = replace(in_memory, parallel=parallel)
    killed = RankProcesses(by_files).rendezvous
    assert killed._directory is not None
    assert [*tmp_path.iterdir()] == [killed._directory.path]
    killed._directory._lock.close()
    following = RankProcesses(by_files)
    assert following.rendezvous._directory is not None
    assert [*tmp_path.iterdir()] == [following.rendezvous._directory.path]
    following.close()
    assert [*tmp_path.iterdir()] == []


# ── processes that are killed or stopped ────────────────────────────────────────────────────────

HOW = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
needs_two_cores = pytest.mark.skipif(default_num_threads() < 2, reason="two ranks need two cores")


def rank_pids() -> list[int]:
    return pids_below(os.getpid(), b"rank_process")


def until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def lose(how: signal.Signals) -> None:
    """Kill or stop the second rank. A process that was just started has no command line yet."""
    until(rank_pids)
    (rank,) = rank_pids()
    os.kill(rank, how)
    if how == signal.SIGSTOP:  # its other threads go on until the one that took the signal runs
        threads = [*Path(f"/proc/{rank}/task").iterdir()]
        until(lambda: all((one / "stat").read_text().split(") ")[1][0] == "T" for one in threads))


@contextmanager
def loaded(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_lost: Callable[[RankLostError], None] = lambda error: None,
) -> Iterator[RankExecutor]:
    """Two ranks that are loaded; none may be left when the first has ended them."""
    monkeypatch.setattr(rank_start, "_END_SECONDS", 0.5)
    executor = start_ranks(of_two_ranks(model), on_lost)
    executor.load()
    try:
        yield executor
    finally:
        executor.close()
    assert not rank_pids()


def wait_little(executor: RankExecutor) -> None:
    """Let ranks wait for each other, from here on, no longer than a stopped one is given."""
    limits = RankLimits(TimeLimit(0.5, "--step-timeout"), LIMIT)
    executor._limits = executor._worker._group._limits = limits  # type: ignore[attr-defined]


@needs_two_cores
@HOW
def test_a_rank_that_is_lost_at_the_load_is_told_of(
    model: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_start, "_END_SECONDS", 0.5)
    monkeypatch.setattr(late_ranks, "_LOOK_SECONDS", 0.01)
    late: list[Sequence[int]] = []
    config = replace(of_two_ranks(model), limits=LimitsConfig(engine_ready_timeout=0.5))
    executor = start_ranks(config, on_late=late.append)
    lose(how)
    hangs = r"^rank 1 hangs: .* for 0.5 s; raise --engine-ready-timeout if it may take longer$"
    with pytest.raises(RankLostError, match=hangs if how == signal.SIGSTOP else "^rank 1 was end"):
        executor.load()
    assert not rank_pids()
    if how == signal.SIGSTOP and shared_memory.is_supported():
        assert late == [[1]], "told while it is waited for"


@needs_two_cores
def test_ranks_that_have_loaded_are_not_late(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that has nothing to do while the first draws and reads."""
    monkeypatch.setattr(late_ranks, "_LOOK_SECONDS", 0.01)
    with loaded(model, monkeypatch):
        until(lambda: "late-ranks" not in [thread.name for thread in threading.enumerate()])


def test_a_rank_that_another_one_kept_waiting_is_not_taken_for_the_cause_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank waits for the same one, and finds which it is."""
    waited = tmp_path / "waited"
    waited.write_text(f"#!/bin/sh\nsleep 1\nexit {rank_process.WAITED}\n")
    waited.chmod(0o700)
    monkeypatch.setattr(rank_process.sys, "executable", str(waited))
    monkeypatch.setattr(rank_start, "_WAITED_SECONDS", 0.5)
    ended: list[RankLostError] = []
    ranks = RankProcesses(of_two_ranks(model), on_lost=ended.append)
    ranks.start()
    until(lambda: ranks._processes[0].poll() is not None)
    ranks.check()
    until(lambda: ended)
    with pytest.raises(RankLostError, match="rank 1 has ended, for it has waited in vain for anot"):
        ranks.check()
    ranks.close()


@needs_two_cores
def test_a_rank_that_refuses_is_told_of_in_its_words_and_by_no_line_of_its_own(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.environ["LORA_SERVE_CPU_PATH"] = "abacus"
    try:
        ranks = RankProcesses(of_two_ranks(model))
        ranks.start()
        until(lambda: ranks._processes[0].poll() is not None)
    finally:
        del os.environ["LORA_SERVE_CPU_PATH"]
    told = told_by_ranks(ranks.links)
    ranks.close()
    assert str(told).startswith("rank 1: LORA_SERVE_CPU_PATH 'abacus': this machine runs ")
    assert "abacus" not in capfd.readouterr().err


def prepares(executor: RankExecutor, adapter: AdapterCheckpoint) -> None:
    executor.prepare_adapter(adapter)


def steps(executor: RankExecutor, adapter: AdapterCheckpoint) -> None:
    executor.submit(SchedulerOutput(0, (chunk(0, [1, 2, 3], 0, BASE_MODEL, GREEDY, 1),)))
    executor.collect()


@needs_two_cores
@HOW
@pytest.mark.parametrize("act", [prepares, steps])
def test_a_rank_that_is_lost_when_it_is_asked_for_something_is_told_of(
    model: Path,
    adapter: AdapterCheckpoint,
    act: Callable[[RankExecutor, AdapterCheckpoint], None],
    how: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[RankLostError] = []
    with loaded(model, monkeypatch, ended.append) as executor:
        act(executor, adapter)
        wait_little(executor)
        lose(how)
        hangs = r"^rank 1 hangs: .* 0.5 s; raise --step-timeout if it may take longer$"
        with pytest.raises(RankLostError, match=hangs if how == signal.SIGSTOP else "^rank 1 "):
            act(executor, adapter)
        if how == signal.SIGKILL:
            until(lambda: ended)  # the engine ends with a rank that has ended
    killed = "rank 1 was ended by signal 9 (Killed); usually the system was out of memory"
    assert [str(told).partition(":")[0] for told in ended] == (
        [killed] if how == signal.SIGKILL else []
    )


@needs_two_cores
def test_a_rank_that_hung_at_an_adapter_is_asked_nothing_more(
    model: Path, adapter: AdapterCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late answer would be taken for that of the next call."""
    with loaded(model, monkeypatch) as executor:
        wait_little(executor)
        lose(signal.SIGSTOP)
        with pytest.raises(RankLostError, match=r"^rank 1 hangs") as first:
            prepares(executor, adapter)
        os.kill(rank_pids()[0], signal.SIGCONT)
        executor._limits = LIMITS
        for act in (prepares, steps):
            with pytest.raises(RankLostError) as again:
                act(executor, adapter)
            assert again.value is first.value


@needs_two_cores
@HOW
def test_a_rank_that_is_lost_before_the_end_is_not_waited_for_for_ever(
    model: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(model, monkeypatch):
        lose(how)


# ── threads and links of a rank ─────────────────────────────────────────────────────────────────


@needs_two_cores
def test_a_rank_that_has_lost_a_thread_ends_at_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is asked next would be waited for in vain, for as long as a step may take."""
    with loaded(model, monkeypatch) as executor:
        executor._others[0].calls.send(b"nothing that could be read", limit=LIMIT)
        with pytest.raises(RankLostError, match=f"exit code {EXIT_CODE_OF_LOST_THREAD}"):
            until(executor._check)


def test_a_rank_gives_up_when_its_kv_is_not_taken_in_time() -> None:
    link, theirs = new_link("the first rank")
    saved: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
    saved.put((bytes(16 << 20),))
    gave_up: list[RankLostError] = []
    rank_server._send_saved(link, saved, TimeLimit(0.05, "--step-timeout"), gave_up.append)
    assert [str(error) for error in gave_up] == [
        "the first rank hangs: it has not answered in 0.05 s; raise --step-timeout if it may take "
        "longer"
    ]
    link.close()
    theirs.close()


def test_a_rank_that_waits_in_vain_at_the_load_leaves_it_to_the_cause_to_tell() -> None:
    class WaitingWorker:
        def load(self) -> None:
            raise RankLostError("rank 2 hangs")

    steps, theirs = new_link("the first rank")
    links = RankLinks(steps, steps)
    with pytest.raises(RankLostError, match="rank 2 hangs"):
        rank_server.serve_rank(WaitingWorker(), links)  # type: ignore[arg-type]
    links.close()
    assert not theirs.recv(1), "it has told the first rank nothing"
    theirs.close()
