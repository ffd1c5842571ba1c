"""A rank beside the first: it does the steps that it is sent, and prepares adapters meanwhile.

It knows no more of requests than a step says, and answers with KV and with errors alone.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import msgspec
from msgspec import structs

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.distributed.limits import TimeLimit
from lora_serve.distributed.link import Link
from lora_serve.errors import LoraServeError, RankLostError
from lora_serve.worker.rank_wire import StepDecoder
from lora_serve.worker.worker import Worker

logger = logging.getLogger(__name__)

ANSWER_LIMIT = TimeLimit(60.0)  # in which the first rank takes what it is told of the load
NO_MEMORY = "MemoryError: "  # begins the answer of a rank that has no room for an adapter
_LOOK_SECONDS = 0.0002  # between two looks whether a card is done with a step


@dataclass(frozen=True, slots=True)
class RankLinks:
    """What one rank hears on: steps in their order, and calls about adapters beside them."""

    steps: Link
    calls: Link

    def close(self) -> None:
        self.steps.close()
        self.calls.close()


def refuse(links: RankLinks, error: LoraServeError) -> None:
    """Tell the first rank, which tells the user, why this one cannot serve."""
    with suppress(RankLostError):  # it has ended, and has told why itself
        links.steps.send(str(error).encode() or b"it cannot load", limit=ANSWER_LIMIT)


def serve_rank(
    worker: Worker,
    links: RankLinks,
    limit: TimeLimit = ANSWER_LIMIT,
    give_up: Callable[[RankLostError], None] = lambda error: None,
) -> bool:
    """Load, say so, then do steps until the first rank is gone.

    Args:
        worker: of this rank.
        links: to the first rank.
        limit: that the first rank may take for a message, once it has begun or is asked for.
        give_up: called in a thread that the first rank has left waiting for longer; it ends this
            process, for whatever the thread did would be missing.

    Returns:
        Whether it has loaded; else the first rank was told why not.
    """
    try:
        worker.load()
    except RankLostError:
        raise  # it has waited for another rank, which knows why
    except LoraServeError as error:
        refuse(links, error)
        return False
    links.steps.send(b"", limit=ANSWER_LIMIT)
    saved: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
    for name, target in (
        ("saved", partial(_send_saved, links.steps, saved, limit, give_up)),
        ("calls", partial(_answer_calls, worker, links.calls, limit, give_up)),
    ):
        threading.Thread(target=target, name=name, daemon=True).start()
    try:
        _run_steps(worker, links.steps, saved, limit)
    finally:
        saved.put(None)
    return True


def _run_steps(
    worker: Worker,
    steps: Link,
    saved: queue.SimpleQueue[tuple[bytes, ...] | None],
    limit: TimeLimit,
) -> None:
    """Take on each step when it comes, also while a card is at the one before."""
    decoder = StepDecoder()
    has_saves: deque[bool] = deque()  # of the steps that are not collected
    while True:
        while has_saves and _ends_first(worker, steps):
            records = worker.collect().kv_saves
            if has_saves.popleft():
                saved.put(records)
        try:
            message = steps.receive(None)
        except RankLostError:
            return  # the engine has ended
        step, has_loads = decoder.decode(message)
        if has_loads:
            loads = decoder.decode_loads(steps.receive(limit))
            step = structs.replace(step, kv_loads=loads)
        worker.submit(step)
        has_saves.append(bool(step.kv_saves))


def _ends_first(worker: Worker, steps: Link) -> bool:
    """Wait until the device is done with the oldest step, or the next one comes."""
    while not worker.has_ended():
        if steps.has_message(_LOOK_SECONDS):
            return False
    return True


def _send_saved(
    steps: Link,
    saved: queue.SimpleQueue[tuple[bytes, ...] | None],
    limit: TimeLimit,
    give_up: Callable[[RankLostError], None],
) -> None:
    """Send KV in a thread of its own: the first rank takes it when it has done later steps."""
    encoder = msgspec.msgpack.Encoder()
    while (records := saved.get()) is not None:
        try:
            steps.send(encoder.encode(records), limit=limit)
        except RankLostError as error:
            give_up(error)
            return


def _answer_calls(
    worker: Worker, calls: Link, limit: TimeLimit, give_up: Callable[[RankLostError], None]
) -> None:
    """Prepare and discard adapters; each call gets one answer, empty or an error's text."""
    while True:
        try:
            head = calls.receive(None)
        except RankLostError:
            return  # the engine has ended
        try:
            call = receive_call(head, calls, limit)
            try:
                if isinstance(call, AdapterCheckpoint):
                    worker.prepare_adapter(call)
                else:
                    worker.discard_adapter(call)
                answer = ""
            except MemoryError as error:
                answer = f"{NO_MEMORY}{error}"
            except Exception as error:  # the first rank's to judge
                logger.exception("an adapter's call failed")
                answer = f"{type(error).__name__}: {error}"
            calls.send(answer.encode(), limit=limit)
        except RankLostError as error:
            give_up(error)
            return


def send_call(calls: Link, call: AdapterCheckpoint | bytes, limit: TimeLimit) -> None:
    """Ask a rank to prepare its share of an adapter, or to discard the one of a digest.

    The tensors' bytes go from where they lie, without a copy.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(call, protocol=5, buffer_callback=buffers.append)
    tensors = [buffer.raw() for buffer in buffers]
    calls.send(pickle.dumps((head, [data.nbytes for data in tensors])), limit=limit)
    if tensors:
        calls.send(*tensors, limit=limit)


def receive_call(
    head: bytes | bytearray, calls: Link, limit: TimeLimit
) -> AdapterCheckpoint | bytes:
    """Read a call that begins with the message `head`; the first rank sends the rest in time."""
    call, sizes = pickle.loads(head)
    data = memoryview(calls.receive(limit) if sizes else b"")
    ends = list(accumulate(sizes))
    tensors = [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    read: AdapterCheckpoint | bytes = pickle.loads(call, buffers=tensors)
    return read
