"""The process of a rank behind the first: its program, and how it ends."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

from lora_serve.config import EngineConfig
from lora_serve.distributed.limits import rank_limits
from lora_serve.distributed.link import Link
from lora_serve.errors import LoraServeError, RankLostError
from lora_serve.observability.log import set_up_logging
from lora_serve.observability.lost_threads import exit_with_any_thread
from lora_serve.ops.cpu.numa import NodeShare, bind_thread, node_free_bytes
from lora_serve.worker.device import Device
from lora_serve.worker.rank_cards import open_card, open_card_group
from lora_serve.worker.rank_server import RankLinks, refuse, serve_rank
from lora_serve.worker.rendezvous import Rendezvous, open_group
from lora_serve.worker.worker import Worker

logger = logging.getLogger(__name__)

REFUSED = 3  # the exit code of a rank that has told the first one why
WAITED = 4  # of one that was kept waiting by another
_PR_SET_PDEATHSIG = 1
# Its imports take seconds, in which it must end with its parent, too, even while it is stopped.
_PROGRAM = f"""
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


def rank_command(steps: int, calls: int) -> tuple[str, ...]:
    """The command of a child of this process. steps, calls: descriptors of its ends of the links.

    The first message on `steps` is a pickle of its rank, the config, the rendezvous and its share
    of the cores, if it has one.
    """
    return (sys.executable, "-c", _PROGRAM, *map(str, (os.getpid(), steps, calls)))


def run(steps: int, calls: int) -> None:
    """Be a rank, and end this process."""
    code = main(steps, calls)
    logging.shutdown()
    # Python would end its threads beneath compiled code, which may take that for a fault: an abort
    # in the log of an engine that ends as it should.
    os._exit(code)


def main(steps: int, calls: int) -> int:
    """Be a rank; returns its exit code. steps, calls: as of `rank_command`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the engine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    links = RankLinks(
        *(Link(socket.socket(fileno=end), "the first rank") for end in (steps, calls))
    )
    rank, config, place, share = pickle.loads(links.steps.receive(None))
    set_up_logging(config.log, f"rank {rank}", label=f"rank {rank}")
    exit_with_any_thread(f"rank {rank}")
    if share is not None:
        bind_thread(share)
    try:
        return _serve(rank, config, place, share, links)
    except RankLostError as error:  # the first rank finds that, too, and tells of it
        _note_waited(rank, error)
        return WAITED
    except Exception as error:  # else Python prints it past the log
        logger.critical("rank %d ends by an error that it did not expect", rank, exc_info=error)
        return 1


def make_worker(
    rank: int,
    config: EngineConfig,
    place: Rendezvous,
    share: NodeShare | None,
    check: Callable[[], None] = lambda: None,
) -> Worker:
    """A rank's worker, which has exchanged something with the others if they have cards.

    share: its cores, if they are not the system's to choose. check: as of SharedMemoryGroup.
    """
    device: Device | None = None
    group, limits = open_group(rank, config, place, check), rank_limits(config.limits)
    if place.card_store is not None:
        device = open_card(rank, limits, check)
        group = open_card_group(device.torch_device, group, place.card_store, limits)
        device.record_event().wait()  # until all have come
    free_bytes = None if share is None else partial(node_free_bytes, share)
    return Worker.of(config, device=device, group=group, node_free_bytes=free_bytes)


def _serve(
    rank: int, config: EngineConfig, place: Rendezvous, share: NodeShare | None, links: RankLinks
) -> int:
    """Be a rank, until there are no more steps; returns its exit code."""
    try:
        worker = make_worker(rank, config, place, share)
    except RankLostError:
        raise  # it has waited for another rank, which knows why
    except LoraServeError as error:
        refuse(links, error)
        return REFUSED

    def give_up(error: RankLostError) -> None:
        _note_waited(rank, error)
        os._exit(WAITED)

    return 0 if serve_rank(worker, links, rank_limits(config.limits).step, give_up) else REFUSED


def _note_waited(rank: int, error: RankLostError) -> None:
    logger.info("rank %d ends: %s", rank, error)
