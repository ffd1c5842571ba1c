"""Commands that talk to a server, against one that means harm.

What it says never acts on the terminal, and no answer that makes no sense ends in a traceback or
passes for a success.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from lora_serve.cli import remote
from lora_serve.cli.main import main
from tests.fakes.http_server import Call, serving
from tests.fakes.terminal import Terminal

# The title of the window, red, and what follows from right to left: for terminals, orders.
ORDERS = "\x1b]0;title\x07\x9b31m\u202e"
NAME = f"name{ORDERS}"
ACTING = set(ORDERS) - set("]0;title31m")
METRICS = f"""
lora_serve:kv_tier_bytes{{tier="{NAME}"}} 5
vllm:num_requests_waiting_by_reason{{reason="{NAME}"}} 3
"""
CARD = {"id": NAME, "parent": "base", "digest": NAME, "residency": NAME, "root": NAME}
IN_FLIGHT = {
    "id": NAME,
    "adapter": NAME,
    "state": NAME,
    "age_seconds": 1.0,
    "num_prompt_tokens": 1,
    "num_cached_tokens": 1,
    "num_output_tokens": 1,
}


class HostileServer:
    """events: of the next answers. refusal: of each change, if it is refused.

    endless: the status of answers that never end, to all but /v1/models if streams_only.
    """

    url = ""
    events: tuple[str, ...] = ()
    refusal: str | None = None
    redirects = False
    endless: int | None = None
    streams_only = False
    encoding = "identity"
    paths: list[str]

    def __init__(self) -> None:
        self.paths = []

    async def __call__(self, call: Call) -> None:
        path = call.path.partition("?")[0]
        self.paths.append(path)
        if self.redirects:
            await self._reply(call, {"moved": 1}, 302, Location=f"{self.url}/elsewhere")
        elif self.endless and not (self.streams_only and path == "/v1/models"):
            await _never_end(call, self.endless)
        elif path == "/v1/models":
            await self._reply(call, {"data": [{"id": f"base{ORDERS}"}, CARD]})
        elif path == "/v1/requests":
            await self._reply(call, {"data": [IN_FLIGHT]})
        elif path == "/adapter_changes":
            await self._reply(call, {"data": 5})
        elif path == "/metrics":
            await self._reply(call, METRICS.encode())
        elif self.refusal is not None:
            await self._reply(call, {"error": {"message": self.refusal}}, 400)
        else:
            for event in self.events:
                await call.event(event)

    async def _reply(self, call: Call, document: object, status: int = 200, **headers: str) -> None:
        more = {"Connection": "close", "Content-Encoding": self.encoding}
        await call.reply(document, status, **more, **headers)


async def _never_end(call: Call, status: int) -> None:
    call.writer.write(f"HTTP/1.1 {status} Said\r\nConnection: close\r\n\r\n".encode())
    while True:
        call.writer.write(b"x" * 65536)
        await call.writer.drain()


@pytest.fixture
def hostile() -> Iterator[HostileServer]:
    server = HostileServer()
    with serving(server) as url:
        server.url = url
        yield server


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


def piece(content: object, **more: object) -> str:
    return json.dumps({"choices": [{"delta": {"content": content}}], **more})


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("adapters", "ls"), 0),
        (("adapters", "ls", "--json"), 0),
        (("adapters", "replace", f"{NAME}s", "/nowhere"), 1),  # told the name that is near
        (("adapters", "unload", NAME), 1),
        (("top", "--once", "--interval", "0.1"), 0),
        (("chat", "--model", "nosuch"), 2),
        (("chat",), 2),
    ],
)
def test_no_order_of_a_server_reaches_the_terminal(
    words: tuple[str, ...],
    code: int,
    hostile: HostileServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile.refusal = f"refused{ORDERS}"
    monkeypatch.setattr("sys.stdin", StringIO("/adapter\nhello\n"))
    assert main([*words, "--url", hostile.url]) == code
    text = said(capsys)
    assert "b]0;title" in text  # what is left of it
    assert ACTING.isdisjoint(text)


def test_no_answer_gives_orders_to_a_terminal_that_reads_a_pipe(hostile: HostileServer) -> None:
    hostile.events = (piece(f"an{ORDERS}swer"), "[DONE]")
    chat = f"echo hello | {sys.executable} -m lora_serve.cli.main chat --url {hostile.url}"
    with Terminal(["sh", "-c", chat]) as terminal:
        assert terminal.wait() == 0
        assert "an]0;title31mswer" in terminal.shown
        assert ACTING.isdisjoint(terminal.shown)


@pytest.mark.parametrize(
    "event",
    [
        "5",
        "[" * 100_000,
        '{"choices": 5}',
        '{"choices": [5]}',
        '{"error": "it failed"}',
        piece(7),
        piece("x", usage={"completion_tokens": "many"}),
        piece("x", usage=5),
    ],
)
def test_what_is_no_answer_is_told_in_one_line(
    event: str,
    hostile: HostileServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile.events = (event, "[DONE]")
    monkeypatch.setattr("sys.stdin", StringIO("hello\n"))
    assert main(["chat", "--url", hostile.url]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lora-serve: error: ")
    assert error.count("\n") == 1


def test_half_a_pair_of_an_answer_is_shown_and_saved_as_a_mark(
    hostile: HostileServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile.events = (piece("\ud83d"), "[DONE]")
    monkeypatch.setattr("sys.stdin", StringIO(f"hello\n/save {tmp_path}/chat.json\n"))
    assert main(["chat", "--url", hostile.url]) == 0
    assert capsys.readouterr().out == "\ufffd\n"
    assert "\ufffd" in (tmp_path / "chat.json").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("adapters", "unload", "x"),
        ("adapters", "load", "x", "/nowhere"),
        ("adapters", "rollback", "x"),
        ("top", "--once"),
        ("chat",),
    ],
)
def test_a_redirect_is_neither_followed_nor_taken_for_a_success(
    words: tuple[str, ...], hostile: HostileServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile.redirects = True
    assert main([*words, "--url", hostile.url]) != 0
    assert f"redirects to {hostile.url}/elsewhere" in said(capsys)
    assert len(hostile.paths) == 1


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize(
    "words", [("adapters", "ls"), ("adapters", "unload", "x"), ("top", "--once"), ("chat",)]
)
def test_an_answer_of_any_size_is_given_up(
    words: tuple[str, ...],
    status: int,
    hostile: HostileServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 2**20)
    hostile.endless = status
    assert main([*words, "--url", hostile.url]) == 2
    assert f"{hostile.url}: the answer is larger than 1.0 MiB" in said(capsys)


def test_a_stream_without_end_is_given_up(
    hostile: HostileServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "MAX_STREAM_BYTES", 2**20)
    monkeypatch.setattr("sys.stdin", StringIO("hello\n"))
    hostile.endless, hostile.streams_only = 200, True
    assert main(["chat", "--url", hostile.url]) == 2
    assert "the answer is larger than 1.0 MiB" in said(capsys)


def test_a_compressed_answer_is_not_unpacked(
    hostile: HostileServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile.encoding = "gzip"
    assert main(["adapters", "ls", "--url", hostile.url]) == 2
    assert "the answer is compressed (gzip), which was not asked for" in said(capsys)


def test_a_history_that_is_none_is_told(
    hostile: HostileServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", "rollback", "x", "--url", hostile.url]) != 0
    assert "/adapter_changes gives no list of changes" in said(capsys)
