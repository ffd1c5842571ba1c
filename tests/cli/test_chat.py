"""`lora-serve chat` on a real terminal and in a pipe, against a server without a model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from lora_serve.cli.chat_input import read_message
from lora_serve.cli.chat_stream import Answer
from lora_serve.cli.main import main
from lora_serve.errors import InvalidRequestError
from tests.cli.conftest import FakeServer
from tests.fakes.engine import write_adapter
from tests.fakes.terminal import Terminal

CHAT = (sys.executable, "-m", "lora_serve.cli.entry", "chat")
FIGURES = r"first token [0-9.]+ m?s"  # below each answer


def load(server: FakeServer, name: str, path: str) -> None:
    import httpx

    body = {"lora_name": name, "lora_path": path}
    httpx.post(f"{server.url}/v1/load_lora_adapter", json=body).raise_for_status()


def test_tokens_that_came_at_once_tell_no_speed() -> None:
    assert Answer(num_tokens=5, first_token_seconds=0.5, seconds=0.501).tokens_per_second is None
    assert Answer(num_tokens=5, first_token_seconds=0.5, seconds=1.5).tokens_per_second == 4


@pytest.fixture
def in_background() -> Iterator[None]:
    """Interrupts are ignored, as a shell has it for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_background")  # where Ctrl-C is heard only by who asks for it
def test_a_chat_on_a_terminal(fake_server: FakeServer, tmp_path: Path) -> None:
    load(fake_server, "tenant", write_adapter(tmp_path / "a", "ALPHA"))
    saved = tmp_path / "chat.json"
    with Terminal([*CHAT, "--url", fake_server.url]) as terminal:
        terminal.expect(r"base/model at http://.*> ")
        terminal.type("Good day\r")
        terminal.expect("You said: ")
        assert "prompt tokens cached, " in terminal.expect(FIGURES)
        terminal.type("/ada\tten\t\r")  # completes the command, and the adapter's name
        terminal.expect("asking tenant")
        terminal.type("/set temperature 0.7\r")
        terminal.expect("temperature 0.7")
        terminal.type('"""one\rtwo"""\r')
        terminal.expect("ALPHA")
        terminal.expect(FIGURES)
        terminal.type("/save " + str(saved) + "\r")
        terminal.expect("saved 4 messages")

        fake_server.hold_answers()
        terminal.type("hello?\r")
        terminal.expect("hello\\?\r\n")
        while len(fake_server.engine.growing) == 0:
            time.sleep(0.01)
        terminal.type("\x03")
        terminal.expect("stopped; the question is forgotten")
        fake_server.let_go()
        terminal.type("/bogus\r")
        terminal.expect("error: /bogus is no command")
        terminal.type("still here\r")
        terminal.expect("still here")
        terminal.expect(FIGURES)
        terminal.expect("> ")  # ^D means the end of input only to a prompt that is shown
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert len(fake_server.engine.ended_early) == 1
    body = json.loads(saved.read_text())
    assert (body["model"], body["temperature"]) == ("tenant", 0.7)
    assert [one["content"] for one in body["messages"]][::2] == ["Good day", "one\ntwo"]
    assert body["messages"][1]["content"].startswith("You said: ")


def test_in_a_pipe_each_line_is_a_question_of_one_conversation(fake_server: FakeServer) -> None:
    done = subprocess.run(
        [*CHAT, "--url", fake_server.url, "--system", "Be brief."],
        input="one\n\n/set max_tokens 100\ntwo\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "max_tokens 100\n")
    first, _, second = done.stdout.partition("#0\n")
    assert first.startswith("You said: ")
    assert "Be brief." in first
    assert second.count("You said: ") == 2  # the second answer repeats the first
    assert "two" in second
    assert "\x1b" not in done.stdout


def test_a_model_without_a_chat_template_continues_text(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise InvalidRequestError("this model has no chat template", "messages")

    monkeypatch.setattr(fake_server.engine.tokenizer, "render_chat", refuse)
    monkeypatch.setattr("sys.stdin", StringIO("Once upon\n"))
    assert main(["chat", "--url", fake_server.url]) == 0
    captured = capsys.readouterr()
    assert captured.out == "You said: Once upon #0\n"
    assert "base/model has no chat template: it continues your texts" in captured.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--url", "URL", "--model", "tenat"], "--model tenat: URL serves base/model, alias"),
        (["--url", "URL", "some/model"], "leave one out"),
        (["--url", "ftp://x"], "--url ftp://x: want http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    fake_server: FakeServer,
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lora_serve.cli.chat_run.DEFAULT_URL", fake_server.url)
    assert main(["chat", *(word.replace("URL", fake_server.url) for word in argv)]) == 2
    error = capsys.readouterr().err
    assert words.replace("URL", fake_server.url) in error
    assert error.count("\n") == 1


def test_messages_of_several_lines() -> None:
    def read(text: str) -> str:
        lines = iter(text.split("\n"))
        return read_message(lambda _: next(lines))

    assert read("one\\\ntwo") == "one\ntwo"
    assert read('"""\none\n\ntwo\n"""') == "one\n\ntwo"
    assert read('"""one"""') == "one"
    assert read("one\ntwo") == "one"


def test_a_chat_ends_the_server_that_it_started(model_path: Path) -> None:
    flags = ("--kv-cache-memory-bytes", "8MiB", "--max-model-len", "256")
    done = subprocess.run(
        [*CHAT, str(model_path), "--served-model-name", "own", *flags],
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "lora-serve is ready on http://127.0.0.1:" in done.stderr
    port = done.stderr.partition("ready on http://127.0.0.1:")[2].split()[0]
    assert main(["chat", "--url", f"http://127.0.0.1:{port}"]) == 2  # it is gone
