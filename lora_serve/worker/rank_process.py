"""Ranks as processes of one machine: how the first one starts and ends them, and what they run.

A rank ends with the engine, however that ends; and the engine with any of its ranks.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lora_serve.config import EngineConfig
from lora_serve.config.parallel import NCCL
from lora_serve.distributed import shared_memory
from lora_serve.distributed.group import ROOT, Group
from lora_serve.distributed.link import Link, new_link
from lora_serve.errors import LoraServeError, RankLostError
from lora_serve.observability.log import set_up_logging
from lora_serve.observability.lost_threads import exit_with_any_thread
from lora_serve.ops.cpu.numa import (
    AUTO,
    NodeShare,
    bind_thread,
    node_free_bytes,
    rank_shares,
    with_threads_of,
)
from lora_serve.private_directory import PrivateDirectory
from lora_serve.worker.device import Device, names_gpu
from lora_serve.worker.rank_cards import check_places, open_card, open_card_group
from lora_serve.worker.rank_executor import RankExecutor, told_by_ranks
from lora_serve.worker.rank_server import RankLinks, refuse, serve_rank
from lora_serve.worker.worker import Worker

logger = logging.getLogger(__name__)

NO_LIMIT_SECONDS = 24 * 3600.0  # where --step-timeout is 0
_END_SECONDS = 5.0  # for ranks to end by themselves
_PR_SET_PDEATHSIG = 1
# A rank's program. Its imports take seconds, in which it must end with its parent, too, even while
# it is stopped.
_RANK = f"""
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
from lora_serve.worker.lean_torch import import_torch
import_torch()
from lora_serve.worker.rank_process import run
run(*map(int, sys.argv[2:]))
"""
_REFUSED = 3  # the exit code of a rank that has told the first one why
_WAITED = 4  # of one that was kept waiting by another
_WAITED_SECONDS = 1.0  # in which the first rank, which waits for the same one, finds which it is
_LOOK_SECONDS = 0.5  # between two looks at which ranks are late


def start_ranks(
    config: EngineConfig,
    on_lost: Callable[[RankLostError], None] = lambda error: None,
    on_late: Callable[[Sequence[int]], None] = lambda ranks: None,
) -> RankExecutor:
    """Start all ranks but the first, which is the calling thread's own.

    Both are called in threads that watch the ranks. on_lost: a rank has ended, which whatever is
    asked of the executor next raises, too. on_late: while they load, all wait for these ranks.
    """
    check_places(config)  # a replica on another machine has not been checked yet
    shares: list[NodeShare] = []
    if config.parallel.cpu_ranks == AUTO:
        shares = rank_shares(config.parallel.tensor_parallel_size)
        config = with_threads_of(config, shares)
    if config.parallel.reduce.num_ranks_in_answers > 1:
        logger.warning(
            "%s: answers depend on the number of ranks, %d; those of another number have another "
            "system_fingerprint, and other stored KV",
            *(config.parallel.reduce, config.parallel.tensor_parallel_size),
        )
    ranks = RankProcesses(config, shares, on_lost, on_late)
    try:
        ranks.start()
        if shares:
            bind_thread(shares[0])  # once the others run, which would inherit it
        worker = _worker(ROOT, config, ranks.meeting, shares[0] if shares else None, ranks.check)
        return RankExecutor(
            worker,
            ranks.links,
            step_seconds(config),
            ranks.close,
            ranks.note_loaded,
            ranks.check,
        )
    except RankLostError as error:
        told = told_by_ranks(ranks.links)
        ranks.close()
        raise told or error from error
    except BaseException:
        ranks.close()
        raise


def step_seconds(config: EngineConfig) -> float:
    """How long one rank waits for another within a step."""
    return config.limits.step_timeout or NO_LIMIT_SECONDS


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where ranks meet: memory that they map, or files that torch.distributed writes.

    backend: of what lies on the host. cards: a file for those on GPUs; None where there are none.
    """

    backend: str
    memory: int = -1
    path: Path = field(default_factory=Path)
    cards: Path | None = None


class RankProcesses:
    """The ranks behind the first. links: to each, in their order.

    shares: the cores of all ranks; empty where the system decides. on_lost, on_late: as of
    `start_ranks`.
    """

    def __init__(
        self,
        config: EngineConfig,
        shares: Sequence[NodeShare] = (),
        on_lost: Callable[[RankLostError], None] = lambda error: None,
        on_late: Callable[[Sequence[int]], None] = lambda ranks: None,
    ) -> None:
        self._config = config
        self._shares = shares
        self._on_lost = on_lost
        self._on_late = on_late
        self._world_size = config.parallel.tensor_parallel_size
        self._directory: PrivateDirectory | None = None
        self.meeting = self._made_meeting(config)
        self.links: list[RankLinks] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lost: RankLostError | None = None
        self._has_started = threading.Event()  # all have loaded, or are not to any more
        self._is_loaded = False
        self._is_closing = False
        self._is_closed = False

    def _made_meeting(self, config: EngineConfig) -> _Meeting:
        """Where they will meet; `close` takes it away."""
        backend, has_cards = _backend(config), names_gpu(config.model.device)
        is_in_memory = backend == "shared_memory"
        memory = shared_memory.new_memory(self._world_size) if is_in_memory else -1
        if is_in_memory and not has_cards:
            return _Meeting(backend, memory)
        self._directory = PrivateDirectory("lora-serve-ranks-", Path(tempfile.gettempdir()))
        path = self._directory.path
        return _Meeting(backend, memory, path / "meeting", path / "cards" if has_cards else None)

    def start(self) -> None:
        for rank in range(1, self._world_size):
            steps, its_steps = new_link(f"rank {rank}")
            calls, its_calls = new_link(f"rank {rank}")
            self.links.append(RankLinks(steps, calls))
            started = threading.Event()
            threading.Thread(
                target=self._watch,
                args=(rank, (its_steps, its_calls), started),
                name=f"rank {rank}",
                daemon=True,
            ).start()
            started.wait()
            for end in (its_steps, its_calls):
                end.close()
            share = self._shares[rank] if self._shares else None
            order = pickle.dumps((rank, self._config, self.meeting, share))
            steps.send(order, seconds=step_seconds(self._config))
        if self.meeting.memory >= 0:
            counters = shared_memory.Counters(self.meeting.memory, self._world_size)
            threading.Thread(
                target=self._tell_late, args=(counters,), name="late-ranks", daemon=True
            ).start()

    def note_loaded(self) -> None:
        """None of them is late any more."""
        self._is_loaded = True
        self._has_started.set()

    def check(self) -> None:
        """Raise RankLostError if a rank has ended."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """End all of them, and wait for that. Again, it does nothing."""
        self._is_closing = True
        self._has_started.set()
        for links in self.links:
            links.close()
        for process in self._processes:
            if not self._is_loaded:  # it may be reading the model, and does not look at its links
                process.kill()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._directory is not None:
            self._directory.close()
        if self.meeting.memory >= 0 and not self._is_closed:
            os.close(self.meeting.memory)
        self._is_closed = True

    def _watch(
        self, rank: int, ends: tuple[socket.socket, socket.socket], started: threading.Event
    ) -> None:
        """Start a rank and wait for its end, in the thread whose end would be the rank's, too."""
        descriptors = [end.fileno() for end in ends]
        if self.meeting.memory >= 0:
            descriptors.append(self.meeting.memory)
        try:
            process = subprocess.Popen(
                (sys.executable, "-c", _RANK, str(os.getpid()), *map(str, descriptors[:2])),
                pass_fds=descriptors,
            )
            self._processes.append(process)
        finally:
            started.set()
        code = process.wait()
        if code == _WAITED:
            time.sleep(_WAITED_SECONDS)
        if self._is_closing:
            return
        lost = RankLostError(f"rank {rank} {_end(code)}")
        self._lost = self._lost or lost  # the first may be why others ended
        if code != _REFUSED:  # else the first rank is told more
            self._on_lost(lost)

    def _tell_late(self, counters: shared_memory.Counters) -> None:
        told: list[int] = []
        while not self._has_started.wait(_LOOK_SECONDS):
            late = counters.late_ranks()
            if late != told:
                self._on_late(late)
            told = late
        counters.close()


def _end(exit_code: int) -> str:
    """How a rank has ended, and what may have been why."""
    if exit_code == _WAITED:
        return "has ended, for it has waited in vain for another one, which its log names"
    if exit_code >= 0:
        return f"has ended, with exit code {exit_code}; its last lines in the log may tell why"
    how = f"was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    if exit_code == -signal.SIGKILL:
        how += "; usually the system was out of memory: dmesg would say so"
    return how


def _backend(config: EngineConfig) -> str:
    """The backend by which ranks exchange what lies on the host."""
    chosen = config.parallel.tensor_parallel_backend
    if chosen not in ("auto", NCCL):
        return chosen
    return "shared_memory" if shared_memory.is_supported() else "gloo"


def _open_group(
    rank: int, config: EngineConfig, meeting: _Meeting, check: Callable[[], None]
) -> Group:
    world_size, seconds = config.parallel.tensor_parallel_size, step_seconds(config)
    if meeting.backend == "shared_memory":
        return shared_memory.SharedMemoryGroup(rank, world_size, meeting.memory, seconds, check)
    from lora_serve.distributed.torch_group import TorchGroup

    return TorchGroup(rank, world_size, meeting.path, seconds)


def _worker(
    rank: int,
    config: EngineConfig,
    meeting: _Meeting,
    share: NodeShare | None,
    check: Callable[[], None] = lambda: None,
) -> Worker:
    """A rank's worker, which has met the others if they have cards. check: of RankProcesses."""
    device: Device | None = None
    group, seconds = _open_group(rank, config, meeting, check), step_seconds(config)
    if meeting.cards is not None:
        device = open_card(rank, seconds, check)
        group = open_card_group(device.torch_device, group, meeting.cards, seconds)
        device.record_event().wait()  # until all have met
    free_bytes = None if share is None else partial(node_free_bytes, share)
    return Worker.of(config, device=device, group=group, node_free_bytes=free_bytes)


def main(steps: int, calls: int) -> int:
    """Be a rank; returns its exit code. steps, calls: descriptors of the links."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the engine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    links = RankLinks(
        *(Link(socket.socket(fileno=end), "the first rank") for end in (steps, calls))
    )
    rank, config, meeting, share = pickle.loads(links.steps.receive(None))
    set_up_logging(config.log, f"rank {rank}", label=f"rank {rank}")
    exit_with_any_thread(f"rank {rank}")
    if share is not None:
        bind_thread(share)
    try:
        return _serve(rank, config, meeting, share, links)
    except RankLostError as error:  # the first rank finds that, too, and tells of it
        _note_waited(rank, error)
        return _WAITED
    except Exception as error:  # else Python prints it past the log
        logger.critical("rank %d ends by an error that it did not expect", rank, exc_info=error)
        return 1


def _serve(
    rank: int, config: EngineConfig, meeting: _Meeting, share: NodeShare | None, links: RankLinks
) -> int:
    """Be a rank, until there are no more steps; returns its exit code."""
    try:
        worker = _worker(rank, config, meeting, share)
    except RankLostError:
        raise  # it has waited for another rank, which knows why
    except LoraServeError as error:
        refuse(links, error)
        return _REFUSED

    def give_up(error: RankLostError) -> None:
        _note_waited(rank, error)
        os._exit(_WAITED)

    return 0 if serve_rank(worker, links, step_seconds(config), give_up) else _REFUSED


def _note_waited(rank: int, error: RankLostError) -> None:
    logger.info("rank %d ends: %s", rank, error)


def run(steps: int, calls: int) -> None:
    """Be a rank, and end this process."""
    code = main(steps, calls)
    logging.shutdown()
    # Python would end its threads beneath compiled code, which may take that for a fault: an abort
    # in the log of an engine that ends as it should.
    os._exit(code)
