from __future__ import annotations

import socket
import threading
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

    def __init__(self, begin: bytes, part: bytes) -> None:
        self.num_sent = 0
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
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize(
    ("begin", "part"),
    [(b"$99999999999\r\n", b"x"), (b"+", b"x"), (b"-", b"x"), (b"*99999999999\r\n", b":1\r\n")],
    ids=["bulk string", "line", "error", "array"],
)
def test_an_endless_answer_is_cut_off_and_told(
    begin: bytes, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MAX_ANSWER_BYTES", LIMIT)
    flood = Flood(begin, part)
    store = RedisStore(flood.url, "tests")
    try:
        with pytest.raises(CatalogUnavailableError, match="answers with more than 1 MiB") as found:
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
        bounded = redis_client._BoundedSocket(ours, 6)
        theirs.sendall(b"1234" * 2)
        buffer = bytearray(4)
        assert bounded.recv_into(buffer) == 4
        with pytest.raises(redis.ConnectionError):
            bounded.recv_into(buffer)
        bounded.sendall(b"next")
        theirs.sendall(b"1234")
        assert bounded.recv_into(buffer) == 4
