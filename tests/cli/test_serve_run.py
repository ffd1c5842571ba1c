"""How `lora-serve serve` starts, or does not, as a user sees it: the command itself is run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from lora_serve.cli import serve_run
from lora_serve.cli.arguments import add_config_arguments, engine_config, fleet_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.config import CatalogConfig, EngineConfig, LoRAConfig, ModelConfig, ServerConfig
from lora_serve.demo.model import DemoPaths
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.engine.frontend.engine_process import EngineProcess
from lora_serve.errors import ConfigError
from lora_serve.ops.cpu.threads import default_num_threads
from lora_serve.server import app
from lora_serve.server.http.listener import Listeners, check_tool_choice
from tests.fakes.engine import FakeEngine

COMMAND = [sys.executable, "-m", "lora_serve.cli.main", "serve"]


def start(
    *arguments: str, temporary: Path = Path("/tmp"), **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary), **environment},
    )


def refusals(*arguments: str) -> list[str]:
    """What `lora-serve serve` says before it ends with 2, line by line.

    It may have said before what it was to do.
    """
    server = start(*arguments)
    _, told = server.communicate(timeout=60)
    assert server.returncode == 2, told
    lines = told.splitlines()
    if ": to serve " in lines[0]:
        del lines[0]
    assert all(line.startswith("lora-serve: error: ") for line in lines), told
    return [line.removeprefix("lora-serve: error: ") for line in lines]


def test_full_collections_do_not_walk_over_what_the_start_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would hold the event loop, and with it /health, for 0.2 s of CPU time."""
    frozen: list[int] = []

    async def note(*_: object, **__: object) -> FakeEngine:
        frozen.append(gc.get_freeze_count())
        return FakeEngine()

    monkeypatch.setattr(AsyncEngine, "start", note)
    monkeypatch.setattr(app, "run_server", note)
    gc.unfreeze()  # what the tests froze for themselves
    with contextlib.closing(Listeners(socket.socket())) as listeners:
        asyncio.run(
            serve_run._serve(
                EngineConfig(), ServerConfig(), listeners, EngineProcess(), CatalogConfig()
            )
        )
    at_start, served = frozen
    assert served > at_start + 10_000


def test_all_that_needs_no_weights_is_refused_at_once(model_path: Path, tmp_path: Path) -> None:
    """The engine never starts: it would say that there are no weights."""
    ignored = shutil.ignore_patterns("*.safetensors")
    model = shutil.copytree(model_path, tmp_path / "model", ignore=ignored)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refusals(
            *(str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("--chat-template", "/none", "--max-model-len", "1000000", "--tokenizer", "/none"),
            *("--kv-disk-path", "/proc/kv"),
            *("--enable-lora", "--lora-modules", "a=/none"),
        )
    assert told[0].startswith(f"cannot listen on --host 127.0.0.1 --port {port}: ")
    assert [next(word for word in line.split() if "-" in word or "/" in word) for line in told] == [
        *("--host", "--chat-template", "--max-model-len", "/none:"),
        *("--kv-disk-path", "--lora-modules"),
    ]


def test_a_template_without_known_tool_calls_is_refused_before_weights_are_read(
    model_path: Path, tmp_path: Path
) -> None:
    """The weights of this model cannot be read at all."""
    model = shutil.copytree(model_path, tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[0].content }}")
    serve = (str(model), "--port", "0", "--enable-auto-tool-choice")
    (told,) = refusals(*serve, "--chat-template", str(template))
    assert told.startswith("--enable-auto-tool-choice: the chat template holds no known format")
    (model / "chat_template.jinja").write_text(template.read_text())
    server = ServerConfig(enable_auto_tool_choice=True)
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        check_tool_choice(server, ModelConfig(model=str(model)))


def test_the_demos_adapters_are_allowed_beside_the_operators_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = DemoPaths(tmp_path / "model", tmp_path / "a" / "alpha", tmp_path / "a" / "beta")
    monkeypatch.setattr("lora_serve.demo.model.ensure_demo", lambda _: paths)
    own = LoRAConfig(enable_lora=True, lora_allowed_roots=("/srv/adapters",))
    lora = serve_run.with_demo_model(EngineConfig(lora=own)).lora
    assert lora.lora_allowed_roots == ("/srv/adapters", str(tmp_path / "a"))
    anywhere = LoRAConfig(enable_lora=True)
    assert serve_run.with_demo_model(EngineConfig(lora=anywhere)).lora.lora_allowed_roots == ()


def test_smollm2_is_served_from_the_file_that_was_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lora_serve.demo.smollm2.ensure_smollm2", lambda _: tmp_path / "a.gguf")
    model = serve_run.with_smollm2(EngineConfig(model=ModelConfig(model="smollm2"))).model
    assert (model.model, model.served_model_name) == (str(tmp_path / "a.gguf"), ("smollm2",))
    assert model.dtype == "float32"
    named = ModelConfig(model="smollm2", served_model_name=("mine",), dtype="bfloat16")
    model = serve_run.with_smollm2(EngineConfig(model=named)).model
    assert (model.served_model_name, model.dtype) == (("mine",), "bfloat16")


def test_every_group_of_settings_that_cannot_be_is_told() -> None:
    told = refusals(
        *("--port", "70000", "--block-size", "3", "--max-loras", "0"),
        *("--override-op", "lore=reference", "--override-op", "linear=gpu"),
    )
    assert [line.split()[0] for line in told] == [
        *("--port", "--override-op", "--override-op", "--block-size", "--max-loras")
    ]


@pytest.mark.parametrize("replicas", [(), ("--replicas", "2")])
def test_ranks_that_cannot_be_are_refused_before_torch_is_imported(
    model_path: Path, tmp_path: Path, replicas: tuple[str, ...]
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    flags = ("--port", "0", "--device", "cpu", "-tp", "1000", *replicas)
    server = start(str(model_path), *flags, PYTHONPATH=path)
    _, told = server.communicate(timeout=60)
    assert server.returncode == 2, told
    heads, cores = told.splitlines()
    refused = "lora-serve: error: --tensor-parallel-size 1000 is above the"
    assert re.fullmatch(rf"{refused} model's \d+ attention heads; lower it", heads)
    assert re.fullmatch(rf"{refused} \d+ cores that may be used; lower it", cores)


@pytest.mark.skipif(default_num_threads() < 2, reason="two ranks need two cores")
def test_what_every_rank_would_refuse_is_told_once(model_path: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model_path, tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    server = start(str(model), "--port", "0", "-tp", "2", "--cpu-threads", "1")
    _, told = server.communicate(timeout=120)
    assert server.returncode == 2, told
    (error,) = [line for line in told.splitlines() if " INFO " not in line]
    assert error.startswith("lora-serve: error: ")
    assert "model.safetensors" in error


def test_the_demos_model_is_not_made_for_a_server_that_is_refused() -> None:
    (told,) = refusals("--chat-template", "/none", "--port", "0")
    assert told.startswith("--chat-template /none cannot be read")


@pytest.mark.parametrize("flags", ["--fair-share key", "--isolate-api-keys"])
def test_what_goes_by_key_needs_keys(flags: str) -> None:
    server = start("/no/model/here", "--port", "0", *flags.split())
    _, told = server.communicate(timeout=60)
    assert server.returncode == 2
    assert told.startswith(f"lora-serve: error: {flags} needs --api-key")


def group_of(server: subprocess.Popen[str]) -> list[str]:
    """Names of the processes in the server's group.

    One that is ending has no command line any more; it closes its files after that.
    """
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = path.read_text().rsplit(")", 1)
            is_alive = path.with_name("cmdline").read_bytes() != b""
        except OSError:  # it has just ended
            continue
        if int(fields.split()[2]) == server.pid and is_alive:
            names.append(name)
    return names


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_ctrl_c_during_the_start_ends_all_processes_quietly(
    model_path: Path, short_path: Path
) -> None:
    """Twice, as people do, and to the whole group of processes, as terminals do."""
    server = start(str(model_path), "--host", "127.0.0.1", "--port", "0", temporary=short_path)
    while len(group_of(server)) < 3:  # with multiprocessing's own there are three
        assert server.poll() is None, server.communicate()
        time.sleep(0.01)
    os.killpg(server.pid, signal.SIGINT)
    time.sleep(0.05)
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGINT)
    _, told = server.communicate(timeout=30)
    # Python ends by the signal itself where it came while a dataclass was made, which calls exec();
    # a shell shows 130 for both.
    assert server.returncode in (130, -signal.SIGINT)
    assert [line for line in told.splitlines() if ": to serve " not in line] == []
    assert group_of(server) == []
    assert list(short_path.iterdir()) == []


SCRIPT = """
import asyncio, signal
from multiprocessing import util
from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.engine.frontend.client import EngineClient

spawn = util.spawnv_passfds

def noted(path, args, fds):
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    return spawn(path, args, fds)

async def start():
    client = EngineClient()
    start = asyncio.ensure_future(client.start(EngineConfig(model=ModelConfig(model="none"))))
    while client.pid is None:
        await asyncio.sleep(0.01)
    start.cancel()
    await client.close()

if __name__ == "__main__":  # the engine's process imports this file, too
    util.spawnv_passfds = noted
    asyncio.run(start())
"""


def test_no_process_begins_where_ctrl_c_would_reach_it(tmp_path: Path, short_path: Path) -> None:
    """Before Python itself is ready it would tell of it, at length."""
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TMPDIR": str(short_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True"], done.stderr  # multiprocessing's own, and ours


def test_a_temporary_directory_too_long_for_sockets_is_told(
    model_path: Path, tmp_path: Path
) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    server = start(str(model_path), "--host", "127.0.0.1", "--port", "0", temporary=long)
    _, told = server.communicate(timeout=60)
    assert server.returncode == 2
    assert told.splitlines()[-1].startswith(f"lora-serve: error: temporary directory {long}: ")
    assert told.endswith("set TMPDIR to a shorter path\n")
    assert list(long.iterdir()) == []


def test_keys_come_from_the_environment_and_from_a_file_that_sighup_reads_again(
    model_path: Path, short_path: Path
) -> None:
    users = short_path / "users"
    users.write_text("old\n")
    flags = ("--port", "0", "--api-key-file", str(users))
    server = start(str(model_path), *flags, temporary=short_path, LORA_SERVE_ADMIN_API_KEY="root")
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        assert url.startswith("http://127.0.0.1:")

        def status(key: str, method: str = "GET", path: str = "/v1/models") -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.request(method, url + path, headers=headers).status_code

        assert [status("old"), status("new"), status("root")] == [200, 401, 200]
        assert status("old", "POST", "/reset_prefix_cache") == 403
        assert status("root", "POST", "/reset_prefix_cache") == 200
        users.write_text("new\n")
        server.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while status("new") == 401:
            assert time.monotonic() < deadline, "SIGHUP was not heard"
            time.sleep(0.01)
        assert status("old") == 401
    finally:
        server.terminate()
        server.communicate(timeout=30)


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
def test_an_empty_key_is_refused_at_start(flag: str) -> None:
    server = start("/no/model/here", "--port", "0", flag, "")
    _, told = server.communicate(timeout=60)
    assert server.returncode == 2
    assert "empty key" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["m", "--max-loras", "4", "--max-lora-rank", "8"], "--max-loras, --max-lora-rank: no ad"),
        (["m", "--max-loras", "4", "--enable-lora"], None),
        (["m"], None),
    ],
)
def test_flags_of_adapters_that_change_nothing_are_told(
    words: list[str], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    parser = OneLineParser()
    add_config_arguments(parser)
    args = parser.parse_args(words)
    serve_run._warn_of_idle_flags(args, engine_config(args))
    assert [record.getMessage().startswith(told or "") for record in caplog.records] == (
        [True] if told else []
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max-replicas", "3"], "--max-replicas: without --replicas one engine answers"),
        (["--routing-policy", "round-robin", "--num-ingresses", "2"], "--routing-policy, --num-i"),
        (["--max-replicas", "3", "--replicas", "1"], None),
        ([], None),
    ],
)
def test_flags_of_replicas_need_replicas(words: list[str], told: str | None) -> None:
    parser = OneLineParser()
    add_config_arguments(parser)
    args = parser.parse_args(words)
    with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
        serve_run._refuse_flags_without_replicas(args, fleet_config(args))


def test_a_server_without_a_model_says_what_it_makes_and_what_to_pass_instead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = DemoPaths(tmp_path / "model", tmp_path / "alpha", tmp_path / "beta")
    monkeypatch.setattr("lora_serve.demo.model.ensure_demo", lambda _: paths)
    serve_run.with_demo_model(EngineConfig())
    told = capsys.readouterr().err
    assert "no MODEL was named, so a tiny one is served" in told
    assert "lora-serve serve DIRECTORY, or a hub id such as" in told
