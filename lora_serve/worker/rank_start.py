"""Starts the ranks of one model as processes of this machine, watches them and ends them.

A rank ends with the engine, however that ends; and the engine with any of its ranks.
"""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from lora_serve.config import EngineConfig
from lora_serve.distributed.group import ROOT
from lora_serve.distributed.limits import rank_limits
from lora_serve.distributed.link import new_link
from lora_serve.errors import RankLostError
from lora_serve.ops.cpu.numa import AUTO, NodeShare, bind_thread, rank_shares, with_threads_of
from lora_serve.worker.late_ranks import LateRanks
from lora_serve.worker.rank_cards import check_places
from lora_serve.worker.rank_executor import RankExecutor, told_by_ranks
from lora_serve.worker.rank_process import REFUSED, WAITED, make_worker, rank_command
from lora_serve.worker.rank_server import RankLinks
from lora_serve.worker.rendezvous import HeldRendezvous

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0  # for ranks to end by themselves
_WAITED_SECONDS = 1.0  # in which the first rank, which waits for the same one, finds which it is


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
        share = shares[0] if shares else None
        return RankExecutor(
            make_worker(ROOT, config, ranks.rendezvous.place, share, ranks.check),
            ranks.links,
            rank_limits(config.limits),
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
        self._world_size = config.parallel.tensor_parallel_size
        self.rendezvous = HeldRendezvous(config)
        self.links: list[RankLinks] = []
        self._late = LateRanks(self.rendezvous.place.memory, self._world_size, on_late)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lost: RankLostError | None = None
        self._is_loaded = False
        self._is_closing = False

    def start(self) -> None:
        for rank in range(1, self._world_size):
            self._start_rank(rank)
        if self.rendezvous.place.memory >= 0:
            self._late.start()

    def note_loaded(self) -> None:
        """None of them is late any more."""
        self._is_loaded = True
        self._late.end()

    def check(self) -> None:
        """Raise RankLostError if a rank has ended."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """End all of them, and wait for that. Again, it does nothing."""
        self._is_closing = True
        self._late.end()
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
        self.rendezvous.close()

    def _start_rank(self, rank: int) -> None:
        """Start a process, and say which rank it is."""
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
        order = pickle.dumps((rank, self._config, self.rendezvous.place, share))
        steps.send(order, limit=rank_limits(self._config.limits).load)

    def _watch(
        self, rank: int, ends: tuple[socket.socket, socket.socket], started: threading.Event
    ) -> None:
        """Run a rank's process until its end, in the thread whose end would be its own, too."""
        steps, calls = (end.fileno() for end in ends)
        try:
            process = subprocess.Popen(
                rank_command(steps, calls),
                pass_fds=(steps, calls, *self.rendezvous.place.descriptors),
            )
            self._processes.append(process)
        finally:
            started.set()
        code = process.wait()
        if code == WAITED:
            time.sleep(_WAITED_SECONDS)
        if self._is_closing:
            return
        lost = RankLostError(f"rank {rank} {_end(code)}")
        self._lost = self._lost or lost  # the first may be why others ended
        if code != REFUSED:  # else the first rank is told more
            self._on_lost(lost)


def _end(exit_code: int) -> str:
    """How a rank has ended, and what may have been why."""
    if exit_code == WAITED:
        return "has ended, for it has waited in vain for another one, which its log names"
    if exit_code >= 0:
        return f"has ended, with exit code {exit_code}; its last lines in the log may tell why"
    how = f"was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    if exit_code == -signal.SIGKILL:
        how += "; usually the system was out of memory: dmesg would say so"
    return how
