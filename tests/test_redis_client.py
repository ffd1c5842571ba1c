from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from lora_serve import redis_client
from lora_serve.catalog import redis_store
from lora_serve.catalog.redis_store import RedisStore
from lora_serve.errors import CatalogUnavailableError
from lora_serve.redis_client import open_redis
from tests.fakes.redis_server import RedisServer, running_redis

LIMIT = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory) as running:
        yield running


class Flood:
    """A server that answers whatever it is sent with a beginning, then up to 32 times the limit."""

    def __init__(self, begin: bytes, part: bytes, pause: float = 0.0) -> None:
        self.num_sent = 0
        self._pause = pause
        self._begin, self._part = begin, part * (65536 // len(part))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(65536)
                connection.sendall(self._begin)
                while self.num_sent < 32 * LIMIT:
                    connection.sendall(self._part)
                    self.num_sent += len(self._part)
                    time.sleep(self._pause)
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize(
    ("begin", "part", "told"),
    [
        (b"$99999999999\r\n", b"x", "1 MiB"),
        (b"+", b"x", "1 MiB"),
        (b"-", b"x", "1 MiB"),
        (b"*99999999999\r\n", b"$300\r\n" + b"x" * 300 + b"\r\n", "1 MiB"),
        (b"*99999999999\r\n", b":1\r\n", "16384 lines"),
        (b"*99999999999\r\n", b"*0\r\n", "16384 lines"),
    ],
    ids=["bulk string", "line", "error", "array of long ones", "array", "empty arrays"],
)
def test_an_endless_answer_is_cut_off_and_told(
    begin: bytes, part: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MAX_ANSWER_BYTES", LIMIT)
    flood = Flood(begin, part)
    store = RedisStore(flood.url, "tests")
    message = f"answers with more than {told}"
    try:
        with pytest.raises(CatalogUnavailableError, match=message) as found:
            store.ping()
    finally:
        store.close()
        flood.close()
    assert flood.num_sent < 16 * LIMIT, "what is on its way when it is cut off"
    assert "see what serves this address" in str(found.value)


def test_the_bound_is_of_one_answer_not_of_a_connection(server: RedisServer) -> None:
    client = open_redis("--lora-catalog", server.url, None, 5, LIMIT)
    try:
        client.set("half", b"x" * (LIMIT // 2))
        assert {len(client.get("half")) for _ in range(6)} == {LIMIT // 2}
        with pytest.raises(redis.ConnectionError, match="more than 1 MiB"):
            client.mget(["half"] * 3)
        assert client.ping()
    finally:
        client.close()


def test_what_is_received_into_a_buffer_is_counted() -> None:
    """What hiredis does, where it is installed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        bounded = redis_client._BoundedSocket(ours, 6, 60)
        theirs.sendall(b"1234" * 2)
        buffer = bytearray(4)
        assert bounded.recv_into(buffer) == 4
        with pytest.raises(redis.ConnectionError):
            bounded.recv_into(buffer)
        bounded.sendall(b"next")
        theirs.sendall(b"1234")
        assert bounded.recv_into(buffer) == 4


def test_a_line_that_comes_in_two_parts_is_counted_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        bounded = redis_client._BoundedSocket(ours, 2 * redis_client.BYTES_PER_LINE, 60)
        for part in (b"+a\r", b"\n", b"+b\r\n", b"+c\r"):
            theirs.sendall(part)
            assert bounded.recv(9) == part
        theirs.sendall(b"\n")
        with pytest.raises(redis.ConnectionError, match="more than 2 lines"):
            bounded.recv(9)


def test_an_answer_that_trickles_in_for_ever_is_cut_off_after_some_time() -> None:
    flood = Flood(b"+", b"x" * 65536, pause=0.02)
    store = RedisStore(flood.url, "tests", timeout_seconds=0.1)
    try:
        with pytest.raises(CatalogUnavailableError, match=r"answers for more than 0\.3 s"):
            store.ping()
    finally:
        store.close()
        flood.close()
