"""The engine's process: one thread steps the core, others bring messages to it.

Everything that happens comes through one inbox: messages of the API, ends of adapter loads,
the death of the parent. The engine thread drains it between two steps, and waits on it when idle.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from multiprocessing import connection

import zmq

from lora_serve.config import EngineConfig
from lora_serve.engine import wire
from lora_serve.engine.core.build import build_engine_core
from lora_serve.engine.core.core import EngineCore
from lora_serve.engine.core.executor import make_executor
from lora_serve.engine.core.kv_event_publisher import open_publisher
from lora_serve.engine.core.rank_news import RankNews
from lora_serve.errors import LoraServeError, RankLostError
from lora_serve.messages import EngineMessage, EngineReady, EngineReply, Shutdown
from lora_serve.observability.log import set_up_logging
from lora_serve.observability.lost_threads import exit_with_any_thread

logger = logging.getLogger(__name__)

_EXIT_STATUS_SECONDS = 0.5

Inbox = queue.SimpleQueue[EngineMessage | None]  # None: look again, a load or fetch has ended


def run_engine(config: EngineConfig, message_address: str, reply_address: str) -> None:
    """Serve one API process until it says Shutdown, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    has_ranks = config.parallel.tensor_parallel_size > 1
    set_up_logging(config.log, "engine", label="rank 0" if has_ranks else "")
    exit_with_any_thread("the engine")
    _exit_with_parent()
    news = RankNews(reply_address)
    try:
        _serve(config, message_address, reply_address, news)
    except RankLostError as error:
        time.sleep(_EXIT_STATUS_SECONDS)  # who waits for a rank that has ended knows how it did
        news.lost(error)
    except BaseException as error:  # else multiprocessing prints it past the log
        logger.critical("the engine ends by an error that it did not expect", exc_info=error)
        logging.shutdown()  # wait for that line
        raise SystemExit(1) from None


def _serve(config: EngineConfig, message_address: str, reply_address: str, news: RankNews) -> None:
    context = zmq.Context()
    replies = context.socket(zmq.PUSH)
    replies.connect(reply_address)
    sender = ReplySender(replies)
    inbox: Inbox = queue.SimpleQueue()
    try:
        # First: consumers find the new engine's endpoint again before it says anything.
        publisher = open_publisher(config.kv_events)
        executor = make_executor(config, news.lost, news.late)
        model = executor.load()
        core = build_engine_core(config, executor, model, lambda: inbox.put(None), publisher)
    except LoraServeError as error:
        sender.send(EngineReady(error=wire.error_info(error)))
        context.destroy(linger=2000)
        return
    threading.Thread(
        target=_receive, args=(context, message_address, inbox), name="receiver", daemon=True
    ).start()
    sender.send(core.ready())
    news.note_ready()
    spare_long_collections()
    run_loop(core, inbox, sender)
    core.close()
    executor.close()
    sender.close()


def spare_long_collections() -> None:
    """Keep the garbage collector from walking over all queued requests in the middle of a step.

    What is here now stays for good; what imports made was frozen after them, with the thousand
    objects that they left behind. Steps make no cycles, so what they leave is freed by reference
    counts; with Python's own thresholds a queue of 10,000 requests costs pauses of 60 ms
    (benchmarks/speed/scheduling.py).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 1_000)


class ReplySender:
    """Encodes replies and hands them to zmq; never waits for a slow reader."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        socket.set_hwm(0)
        self._socket = socket
        self._encoder = wire.encoder()

    def send(self, reply: EngineReply) -> None:
        self._socket.send(self._encoder.encode(reply))

    def close(self) -> None:
        self._socket.close(linger=2000)


def run_loop(core: EngineCore, inbox: Inbox, sender: ReplySender) -> None:
    """Step while there is work; between two steps take in all that came. Ends at Shutdown."""
    is_busy = False
    while True:
        messages = drain(inbox, wait_seconds=0.0 if is_busy else core.idle_seconds)
        for message in messages:
            if isinstance(message, Shutdown):
                return
            if message is not None:
                core.handle(message)
        is_busy = core.step()
        for reply in core.take_replies():
            sender.send(reply)


def drain(inbox: Inbox, wait_seconds: float | None) -> list[EngineMessage | None]:
    """Everything in the inbox; waits for the first so long, with None for ever."""
    messages: list[EngineMessage | None] = []
    if wait_seconds != 0:
        try:
            messages.append(inbox.get(timeout=wait_seconds))
        except queue.Empty:
            return messages
    while not inbox.empty():  # no other thread takes any out
        messages.append(inbox.get_nowait())
    return messages


def _receive(context: zmq.Context[zmq.Socket[bytes]], address: str, inbox: Inbox) -> None:
    decoder = wire.message_decoder()
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.connect(address)
    while True:
        message = decoder.decode(socket.recv())
        inbox.put(message)
        if isinstance(message, Shutdown):
            socket.close(linger=0)
            return


def _exit_with_parent() -> None:
    """End this process when the API process dies, however it dies."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
