"""Publishes KV events over ZMQ, from a thread of its own: the engine never waits for it.

Each message is `topic, number, payload`. A number that is missing was lost: by the network, by a
consumer too slow for `hwm`, or here, where too many waited. A ROUTER gives what is still kept from
a number on, as `topic, number, payload`, and `"", -1, ""` at the end. Whenever a consumer
subscribes an empty batch is published. By its number, a consumer that comes back finds out at once
what it has missed, or that another process counts from 0, even if nothing else happens for hours.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from lora_serve.config import KVEventsConfig
from lora_serve.engine.kv_event_sockets import EventSockets, binds_at, open_endpoints
from lora_serve.kv.events import KVEvent

logger = logging.getLogger(__name__)

Encode = Callable[[float, Sequence[KVEvent]], bytes]

BUFFER_BYTES = 256 * 2**20  # of messages that may be asked for again
LOOK_SECONDS = 0.1  # how often a thread without events looks for consumers that ask or subscribe
CLOSE_SECONDS = 1.0
MOST_AT_ONCE = 1000  # messages of subscribers between two batches
MOST_REPLAYS = 16  # between two batches, or one consumer that asks on and on keeps all from others
SUBSCRIBES = b"\x01"
END = (-1).to_bytes(8, "big", signed=True)

_Batch = tuple[int, float, Sequence[KVEvent]]


class EventPublisher:
    """Numbers batches, and hands them to its thread. `start` says how they are written.

    num_batches: of those numbered, lost ones included. num_lost: that found no room.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises ConfigError, naming the endpoint that cannot be had."""
        self._sockets = EventSockets(config)
        endpoint = config.kv_events_endpoint
        how = "published at" if binds_at(endpoint) else "sent to the consumer at"
        logger.info("KV events are %s %s", how, endpoint)
        for reached in open_endpoints(config):
            logger.warning(
                "KV events at %s need no key: every client that reaches this address may read the "
                "tokens of prompts and answers; publish at tcp://[::1]:PORT or ipc://PATH, or let "
                "gateways alone reach it",
                reached,
            )
        self._topic = config.kv_events_topic.encode()
        self._answers_replays = config.kv_events_replay_endpoint is not None
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._most_kept = config.kv_events_buffer_steps
        self._num_kept_bytes = 0
        self._batches: queue.Queue[_Batch | None] = queue.Queue(config.kv_events_max_queue_size)
        self._numbering = threading.Lock()  # batches are queued in the order of their numbers
        self._thread: threading.Thread | None = None
        self.num_batches = 0
        self.num_lost = 0
        self.num_replays = 0

    def start(self, encode: Encode) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(encode,), name="kv-events", daemon=True
        )
        self._thread.start()

    @property
    def has_caught_up(self) -> bool:
        return self._batches.empty()

    def publish(self, events: Sequence[KVEvent]) -> bool:
        """Hand on a batch that is not changed any more; False if there is no room for it."""
        with self._numbering:
            batch = self.num_batches, time.time(), events
            self.num_batches += 1
            try:
                self._batches.put_nowait(batch)
            except queue.Full:
                self.num_lost += 1
                return False
            return True

    def close(self) -> None:
        """Send what waits, if that is soon done."""
        if self._thread is not None:
            try:
                self._batches.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:
                logger.warning("KV events that wait to be published are lost")
            self._thread.join(CLOSE_SECONDS)
        if self._thread is None or not self._thread.is_alive():
            self._sockets.close(CLOSE_SECONDS)

    def _run(self, encode: Encode) -> None:
        while True:
            self._greet_subscribers()
            if self._answers_replays:
                self._answer_replays()
            try:
                batch = self._batches.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if batch is None:
                return
            try:
                self._send(encode, *batch)
            except Exception:  # consumers see that it is missing
                logger.exception("a message of KV events could not be sent")

    def _send(
        self, encode: Encode, number: int, timestamp: float, events: Sequence[KVEvent]
    ) -> None:
        head, payload = number.to_bytes(8, "big"), encode(timestamp, events)
        self._kept.append((head, payload))
        self._num_kept_bytes += len(payload)
        while len(self._kept) > self._most_kept or self._num_kept_bytes > BUFFER_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])
        self._sockets.publisher.send_multipart((self._topic, head, payload))

    def _greet_subscribers(self) -> None:
        """One empty batch for all that came since the last look: they cannot make more of them."""
        has_come = False
        for _ in range(MOST_AT_ONCE):
            if not self._sockets.publisher.poll(0):
                break
            has_come |= self._sockets.publisher.recv()[:1] == SUBSCRIBES
        if has_come:
            self.publish(())

    def _answer_replays(self) -> None:
        for _ in range(MOST_REPLAYS):
            if not self._sockets.replay.poll(0):
                break
            frames = self._sockets.replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                self.num_replays += 1
                self._replay(frames[0], frames[2])

    def _replay(self, client: bytes, first: bytes) -> None:
        """Send what is kept from a number on; what a client does not take in time is lost."""
        for head, payload in self._kept:
            if head >= first:
                self._sockets.replay.send_multipart((client, b"", self._topic, head, payload))
        self._sockets.replay.send_multipart((client, b"", b"", END, b""))


def open_publisher(config: KVEventsConfig) -> EventPublisher | None:
    """Make the publisher, if events are asked for. Raises ConfigError, naming an endpoint."""
    return EventPublisher(config) if config.is_enabled else None
