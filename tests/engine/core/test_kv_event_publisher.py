"""The publisher over real sockets: what comes, what is lost, and what can be had again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import zmq

from lora_serve.config import KVEventsConfig
from lora_serve.engine.core import kv_event_publisher
from lora_serve.engine.core.kv_event_publisher import EventPublisher, open_publisher
from lora_serve.engine.core.kv_event_wire import EventEncoder
from lora_serve.engine.core.kv_events import KVEvents
from lora_serve.engine.kv_event_sockets import check_endpoints
from lora_serve.errors import ConfigError
from lora_serve.identity import BlockHash
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.kv.events import AllBlocksCleared, BlockStored, KVEvent, Medium, Namespace
from lora_serve.kv_groups import KVGroup
from tests.fakes.kv_event_consumers import Subscriber

ENCODER = EventEncoder("map", 1, (KVGroup(),))
PATIENCE = 60.0


class Consumers:
    """Makes consumers, and closes their sockets at the end."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes] | Subscriber] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        return socket

    def subscriber(
        self, settings: KVEventsConfig, loses: Callable[[int], bool] = lambda number: False
    ) -> Subscriber:
        endpoints = settings.kv_events_endpoint, settings.kv_events_replay_endpoint or ""
        subscriber = Subscriber(self._context, *endpoints, loses)
        self._sockets.append(subscriber)
        return subscriber

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.destroy(linger=0)


@pytest.fixture
def consumers() -> Iterator[Consumers]:
    consumers = Consumers()
    yield consumers
    consumers.close()


def config(directory: Path, **settings: object) -> KVEventsConfig:
    given = {
        "kv_events_enable_kv_cache_events": True,
        "kv_events_endpoint": f"ipc://{directory}/events",
        "kv_events_replay_endpoint": f"ipc://{directory}/replay",
        "kv_events_topic": "kv@here:1@m",
    }
    return KVEventsConfig(**(given | settings))  # type: ignore[arg-type]


def started(settings: KVEventsConfig) -> EventPublisher:
    publisher = open_publisher(settings)
    assert publisher is not None
    publisher.start(ENCODER.encode)
    return publisher


def a_block(number: int) -> BlockStored:
    block_hash = BlockHash(number.to_bytes(32, "big"))
    return BlockStored(Medium.GPU, 0, Namespace(), None, [block_hash], [number], [""])


def subscribed(
    consumers: Consumers,
    settings: KVEventsConfig,
    loses: Callable[[int], bool] = lambda number: False,
) -> Subscriber:
    """A consumer that has begun to hear: nothing is published for it but the empty batch."""
    subscriber = consumers.subscriber(settings, loses)
    assert subscriber.read(PATIENCE), "a consumer heard nothing"
    return subscriber


def read_until(subscriber: Subscriber, number: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while subscriber.next_number < number:
        assert time.monotonic() < deadline, f"{subscriber.next_number} of {number} messages"
        subscriber.read(1.0)


def test_a_consumer_that_comes_late_has_what_it_missed_though_nothing_happens(
    tmp_path: Path, consumers: Consumers
) -> None:
    settings = config(tmp_path)
    publisher = started(settings)
    try:
        early = subscribed(consumers, settings)
        publisher.publish([a_block(7)])
        read_until(early, publisher.num_batches)
        late = subscribed(consumers, settings)
        assert late.num_replays == 1
        assert late.indexer.num_blocks == 1
    finally:
        publisher.close()


def test_a_consumer_hears_of_a_new_process_though_nothing_happens(
    tmp_path: Path, consumers: Consumers
) -> None:
    settings = config(tmp_path)
    first = started(settings)
    subscriber = subscribed(consumers, settings)
    for number in range(3):
        first.publish([a_block(number)])
    read_until(subscriber, first.num_batches)
    first.close()
    second = started(settings)
    try:
        assert subscriber.read(PATIENCE), "the consumer heard nothing of a new process"
        assert subscriber.num_restarts == 1
        assert subscriber.indexer.num_blocks == 0
    finally:
        second.close()


def test_what_was_lost_comes_by_a_replay(tmp_path: Path, consumers: Consumers) -> None:
    settings = config(tmp_path)
    publisher = started(settings)
    try:
        rng = Random(1)
        lossy = subscribed(consumers, settings, lambda number: number < 49 and rng.random() < 0.3)
        for number in range(51):
            publisher.publish([a_block(number)])
        read_until(lossy, publisher.num_batches)
        assert lossy.indexer.num_blocks == 51
        assert lossy.num_replays == publisher.num_replays > 0
    finally:
        publisher.close()


def test_the_replay_keeps_the_latest_messages_by_number_and_by_bytes(
    tmp_path: Path, consumers: Consumers, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, kv_events_buffer_steps=5)
    publisher = started(settings)
    try:
        subscriber = subscribed(consumers, settings)
        for number in range(20):
            publisher.publish([a_block(number)])
        read_until(subscriber, publisher.num_batches)
        late = consumers.subscriber(settings)
        late.replay(0)
        assert len(late.payloads) == 5
        monkeypatch.setattr(kv_event_publisher, "BUFFER_BYTES", 1)
        publisher.publish([a_block(20)])
        read_until(subscriber, publisher.num_batches)
        late.replay(0)
        assert len(late.payloads) == 5
    finally:
        publisher.close()


def test_malformed_requests_for_a_replay_are_ignored(tmp_path: Path, consumers: Consumers) -> None:
    settings = config(tmp_path)
    publisher = started(settings)
    try:
        for frames in ([b"x"], [b"", b"short"], [b"", b"a", b"b"], [b"", b"z" * 10_000]):
            dealer = consumers.socket(zmq.DEALER)
            dealer.connect(f"ipc://{tmp_path}/replay")
            dealer.send_multipart(frames)
        subscribed(consumers, settings)
        late = consumers.subscriber(settings)
        late.replay(0)
        assert late.payloads
    finally:
        publisher.close()


class AsksOnAndOn:
    """Stands in the place of the replays' socket: there is always one more that asks."""

    num_asked = 0

    def poll(self, timeout: int) -> int:
        return 1

    def recv_multipart(self) -> list[bytes]:
        self.num_asked += 1
        assert self.num_asked < 10_000, "no batch is published any more"
        return [b"client", b"", bytes(8)]

    def send_multipart(self, frames: Sequence[bytes]) -> None:
        """Nobody reads it."""


def test_a_consumer_that_asks_for_replays_on_and_on_holds_up_no_batch(tmp_path: Path) -> None:
    publisher = open_publisher(config(tmp_path))
    assert publisher is not None
    publisher._sockets.replay.close()
    publisher._sockets.replay = AsksOnAndOn()  # type: ignore[assignment]
    publisher._answer_replays()
    assert 0 < publisher.num_replays < 100
    publisher.close()


def test_consumers_are_told_everything_anew_after_a_batch_found_no_room(
    tmp_path: Path, consumers: Consumers
) -> None:
    settings = config(tmp_path, kv_events_max_queue_size=1)
    publisher, may_write = open_publisher(settings), threading.Event()
    assert publisher is not None

    def encode(timestamp: float, events: Sequence[KVEvent]) -> bytes:
        assert may_write.wait(PATIENCE)
        return ENCODER.encode(timestamp, events)

    publisher.start(encode)
    events = KVEvents(KVEventRecorder(1), publisher)
    deadline = time.monotonic() + PATIENCE
    while not events.has_lost:
        assert time.monotonic() < deadline, "a queue of one message has no end"
        events.recorder.cleared()
        events.flush()
    num_lost = publisher.num_lost
    events.recorder.cleared()
    events.flush()
    assert publisher.num_lost == num_lost == 1  # nothing is tried while there is no room
    may_write.set()
    while events.has_lost:
        assert time.monotonic() < deadline, "there is room and nothing is told"
        events.flush()
    events.close()
    assert publisher.num_batches >= 3


def test_an_event_that_cannot_be_written_is_a_missing_number(
    tmp_path: Path,
    consumers: Consumers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = config(tmp_path, kv_events_replay_endpoint=None)
    publisher = started(settings)
    try:
        subscriber = subscribed(consumers, settings)
        publisher.publish([replace(a_block(0), group=9)])  # of which the model has none
        publisher.publish([a_block(1)])
        read_until(subscriber, publisher.num_batches)
        assert "could not be sent" in caplog.text
    finally:
        publisher.close()


def test_an_endpoint_that_is_taken_is_refused_by_name(tmp_path: Path) -> None:
    settings = config(tmp_path, kv_events_endpoint="tcp://127.0.0.1:*")
    check_endpoints(settings)
    check_endpoints(KVEventsConfig())
    publisher = open_publisher(settings)
    assert publisher is not None
    bound = publisher._sockets.publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    port = bound.rpartition(":")[2]
    taken = config(tmp_path, kv_events_replay_endpoint=f"tcp://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=f"replay_endpoint tcp://127.0.0.1:{port} cannot be used"):
        check_endpoints(taken)
    publisher.close()
    assert open_publisher(KVEventsConfig()) is None


def test_a_publisher_may_connect_to_a_consumer_that_is_bound(
    consumers: Consumers, tmp_path: Path
) -> None:
    consumer = consumers.socket(zmq.SUB)
    port = consumer.bind_to_random_port("tcp://127.0.0.1")
    consumer.subscribe("")
    settings = config(tmp_path, kv_events_endpoint=f"tcp://127.0.0.1:{port}")
    publisher = started(settings)
    deadline = time.monotonic() + PATIENCE
    while not consumer.poll(50):
        assert time.monotonic() < deadline, "a bound consumer heard nothing"
        publisher.publish([AllBlocksCleared()])
    publisher.close()


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [("ipc://{}/events", "published at ipc://"), ("tcp://127.0.0.1:9", "sent to the consumer at")],
)
def test_the_log_says_which_side_listens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, endpoint: str, told: str
) -> None:
    caplog.set_level(logging.INFO)
    settings = config(tmp_path, kv_events_endpoint=endpoint.format(tmp_path))
    publisher = open_publisher(settings)
    assert publisher is not None
    publisher.close()
    assert f"KV events are {told}" in caplog.text


@pytest.mark.parametrize(
    ("endpoints", "is_warned_of"),
    [
        ({"kv_events_endpoint": "tcp://*:*"}, "tcp://*:*"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:*"}, None),
        ({"kv_events_endpoint": "tcp://[::1]:*"}, None),
        ({"kv_events_endpoint": "tcp://10.0.0.7:9"}, None),  # connected to
        ({"kv_events_replay_endpoint": "tcp://0.0.0.0:*"}, "tcp://0.0.0.0:*"),
    ],
)
def test_an_endpoint_that_others_reach_comes_with_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    endpoints: dict[str, str],
    is_warned_of: str | None,
) -> None:
    """Events hold prompts' tokens, and no key is asked for."""
    publisher = open_publisher(config(tmp_path, **endpoints))
    assert publisher is not None
    publisher.close()
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    if is_warned_of is None:
        assert warned == []
    else:
        (line,) = warned
        assert line.startswith(f"KV events at {is_warned_of} need no key: every client that")
