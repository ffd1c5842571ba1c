from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_serve.cli.bench import add_arguments
from lora_serve.cli.parser import OneLineParser
from lora_serve.errors import ConfigError
from tests.fakes.timed_server import TimedServer


def bench(*arguments: str) -> int:
    parser = OneLineParser(prog="lora-serve bench")
    add_arguments(parser)
    args = parser.parse_args(arguments)
    return int(args.run(args))


@contextmanager
def serving(server: TimedServer) -> Iterator[str]:
    """Serve from a thread of its own: the command brings its own event loop."""
    loop = asyncio.new_event_loop()
    context = server.listening()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    url = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(10)
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


SMALL = ("--num-requests", "4", "--input-len", "8", "--output-len", "3")


def test_latency_sends_one_request_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    server = TimedServer(0.01, 0.0)
    with serving(server) as url:
        assert bench("latency", "--url", url, *SMALL) == 0
    assert server.most_running == 1
    out = capsys.readouterr().out
    assert "bench latency: 4 requests, at most 1 at a time" in out
    assert "time to first token" in out


def test_throughput_sends_all_requests_at_once() -> None:
    server = TimedServer(0.1, 0.0)
    with serving(server) as url:
        assert bench("throughput", "--url", url, *SMALL) == 0
    assert server.most_running == 4


def test_serve_is_a_closed_loop_or_poisson(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(TimedServer(0.0, 0.0)) as url:
        assert bench("serve", "--url", url, *SMALL) == 0
        assert "at most 8 at a time" in capsys.readouterr().out
        assert bench("serve", "--url", url, *SMALL, "--request-rate", "200") == 0
        assert "Poisson, 200 requests/s, unlimited" in capsys.readouterr().out


def test_a_warmup_leaves_no_prefix_that_a_measured_prompt_has() -> None:
    server = TimedServer(0.0, 0.0)
    with serving(server) as url:
        bench("latency", "--url", url, *SMALL, "--num-warmups", "2")
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[:2] == [prompt[::-1] for prompt in prompts[2:4]]
    assert len(prompts) == 6


def test_all_adapters_that_the_server_lists_can_be_asked_for() -> None:
    server = TimedServer(0.0, 0.0, adapters=("x", "y"))
    arguments = (*SMALL, "--adapters", "all", "--popularity", "round-robin", "--num-warmups", "0")
    with serving(server) as url:
        bench("serve", "--url", url, *arguments)
    assert sorted(body["model"] for body in server.bodies) == ["x", "x", "y", "y"]


def test_a_saved_workload_is_replayed_with_its_figures_in_json(tmp_path: Path) -> None:
    first, second = TimedServer(0.0, 0.0), TimedServer(0.0, 0.0)
    saved, result = tmp_path / "w.jsonl", tmp_path / "r.json"
    with serving(first) as url:
        bench("latency", "--url", url, *SMALL, "--save-workload", str(saved))
    with serving(second) as url:
        bench("latency", "--url", url, "--workload", str(saved), "--json", str(result))
    assert [body["prompt"] for body in first.bodies] == [body["prompt"] for body in second.bodies]
    document = json.loads(result.read_text())
    assert document["workload"] == str(saved)
    assert len(document["requests"]) == 4


def test_failed_requests_make_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(TimedServer(0.0, 0.0)) as url:
        assert bench("serve", "--url", url, *SMALL, "--adapters", "ghost") == 1
    assert "error, 4 times: HTTP 404" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--url", "http://h", "--serve-args", "--enable-lora"), "needs --model"),
        (("--url", "http://h", "--served-model", "m", "--max-concurrency", "0"), "at least 1"),
        (("--url", "http://h", "--plot", "x.bmp"), ".png"),
        (
            (
                "--url",
                "ftp://h",
            ),
            "want http",
        ),
        (("--model", "m", "--serve-args", "--enable-lore"), "ended with 2.*--enable-lora"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        bench("serve", "--num-warmups", "0", *SMALL, *arguments)


def test_a_url_or_a_model_is_needed_and_not_both() -> None:
    for arguments in ((), ("--url", "http://h", "--model", "m")):
        with pytest.raises(SystemExit):
            bench("serve", *arguments)


@pytest.mark.parametrize("way", ["flag", "file", "environment"])
def test_the_key_is_sent_however_it_is_given(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("secret\n")
    given = {"flag": ("--api-key", "secret"), "file": ("--api-key-file", str(tmp_path / "key"))}
    if way == "environment":
        monkeypatch.setenv("LORA_SERVE_API_KEY", "secret")
    server = TimedServer(0.0, 0.0)
    with serving(server) as url:
        assert bench("latency", "--url", url, *SMALL, *given.get(way, ())) == 0
    assert all(b"Bearer secret" in head for head in server.headers)
