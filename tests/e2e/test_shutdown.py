"""SIGTERM to a server whose clients do not read, do not send, or do both slowly.

A client knows that bytes wait for it in the server when it has read the first ones of a piece that
is larger than all that the system keeps of one connection.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx
import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from lora_serve.server.http.shutdown import LAST_WORDS_SECONDS
from tests.e2e.conftest import StartServer

MAX_SYSTEM_BYTES = 4 * 2**20 + 2**16  # of Linux's buffers, sender's and a small receiver's
NUM_LOGPROBS = 200
PROMPT = [65] * 1500
LARGE = {"prompt": PROMPT, "max_tokens": 1, "logprobs": NUM_LOGPROBS, "echo": True}
ENDLESS = {"prompt": [65], "max_tokens": 8000, "ignore_eos": True, "stream": True}

Start = AbstractContextManager[ServerProcess]


class Wire:
    """A connection that buffers only a little of what is not read yet."""

    def __init__(self, server: ServerProcess) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(60)
        self._socket.connect(("127.0.0.1", server.port))

    def post(self, body: dict[str, object], num_missing: int = 0) -> None:
        """Ask for a completion, but for the last bytes of it."""
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data[: len(data) - num_missing])

    def read_until(self, mark: bytes) -> bytes:
        """What comes up to there."""
        data = b""
        while not data.endswith(mark):
            byte = self._socket.recv(1)
            assert byte, f"the connection ended with {data!r}"
            data += byte
        return data

    def rest(self) -> bytes:
        """What comes before the connection ends, however it does."""
        data = bytearray()
        try:
            while more := self._socket.recv(2**16):
                data += more
        except ConnectionResetError:
            pass
        return bytes(data)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def wires(server: ServerProcess) -> Iterator[list[Wire]]:
    with ExitStack() as stack:
        wires = [Wire(server) for _ in range(5)]
        for wire in wires:
            stack.callback(wire.close)
        yield wires


@pytest.fixture
def server(
    request: pytest.FixtureRequest,
    demo_paths: DemoPaths,
    start_server: StartServer,
    tmp_path: Path,
) -> Iterator[ServerProcess]:
    """Its parameter: --drain-timeout."""
    flags = ("--max-logprobs", str(NUM_LOGPROBS), "--drain-timeout", request.param)
    with start_server(demo_paths.model, tmp_path / "log", *flags) as process:
        process.wait_until_healthy()
        yield process


def begin_large(wire: Wire) -> int:
    """Begin an answer that is not read; returns how many bytes of it are to come."""
    wire.post(LARGE)
    length = int(wire.read_until(b"\r\n\r\n").lower().partition(b"content-length: ")[2].split()[0])
    wire.read_until(b"{")
    assert length > MAX_SYSTEM_BYTES
    return length - 1


def last_words(server: ServerProcess) -> list[str]:
    """What it logged since the signal, but for the lines of requests and of throughput."""
    log = server.log_path.read_text()
    lines = log[log.index("stopping: ") :].splitlines()
    lines = [line for line in lines if not re.search(r"\.(access_log|throughput): ", line)]
    return [re.sub(r"^[-\d]+ [:,\d]+ ", "", line) for line in lines]  # without the times


@pytest.mark.parametrize("server", ["1"], indirect=True)
def test_who_keeps_the_server_waiting_is_cut_off_with_one_line(
    server: ServerProcess, wires: list[Wire]
) -> None:
    deaf, deaf_stream, half, reader, idle = wires
    num_left = begin_large(deaf)
    deaf_stream.post({**LARGE, "stream": True})
    deaf_stream.read_until(b"data: ")  # the first event has the whole prompt's
    half.post(ENDLESS, num_missing=1)
    idle.post({"prompt": "a", "max_tokens": 1})
    idle.read_until(b"}")
    reader.post(ENDLESS)
    reader.read_until(b"data: ")
    server.begin_to_stop()
    assert reader.rest().endswith(b"0\r\n\r\n"), "the error, and the end"
    assert server.wait() == 0
    assert last_words(server) == [
        "stopping: waiting for 3 running requests",
        "WARNING lora_serve.server.http.shutdown: cut off: 1 answers, with an error; 3 connections "
        "whose clients had not taken all of an answer or sent all of a request",
    ]
    assert len(deaf.rest()) < num_left
    assert not deaf_stream.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert half.rest() == b""


@pytest.mark.parametrize("server", ["60"], indirect=True)
def test_an_answer_that_is_taken_slowly_is_waited_for(
    server: ServerProcess, wires: list[Wire]
) -> None:
    num_left = begin_large(wires[0])
    server.begin_to_stop()
    with httpx.Client(base_url=server.base_url) as client:
        while client.get("/health").status_code == 200:
            time.sleep(0.01)
    time.sleep(LAST_WORDS_SECONDS + 1)  # which is all that an answer had once
    assert len(wires[0].rest()) == num_left
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.base_url}/health")
    assert last_words(server) == ["stopping: waiting for 0 running requests"]
