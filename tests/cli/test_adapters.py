"""`lora-serve adapters` against a server without a model, and without a server."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.catalog.records import Record
from lora_serve.catalog.rollout import ReplicaState, Rollout, State
from lora_serve.cli.adapters_actions import Outcome, _changed, list_adapters
from lora_serve.cli.main import main
from lora_serve.cli.remote import Remote, Reply, ServedModel, UnreachableError
from lora_serve.errors import ChangeUnknownError
from lora_serve.fuzz.versions import write_extended
from lora_serve.model_info import Vocabulary
from lora_serve.observability.sizes import shown_bytes
from lora_serve.server.adapter_names.base import Loaded
from lora_serve.server.adapter_names.local import LocalNames
from lora_serve.server.admin.protocol import AdapterWish
from tests.cli.conftest import FakeServer
from tests.fakes.adapter_files import lora_tensors, write_adapter
from tests.fakes.checkpoints import whole_checkpoint
from tests.fakes.engine import write_adapter as write_fake_adapter

MODULES = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.mlp.down_proj": (8, 16)}


def digest_of(path: str) -> str:
    (file,) = Path(path).iterdir()
    return hashlib.sha256(file.read_bytes()).hexdigest()


def told_of(path: str, *, pinned: bool = False) -> str:
    """What is told of an adapter of the fake engine."""
    (file,) = Path(path).iterdir()
    size, more = shown_bytes(file.stat().st_size), ", pinned in memory" * pinned
    return f"{digest_of(path)[:12]}, rank 16, {size}{more}, from {path}"


class Shell:
    """Runs `lora-serve adapters` on one server."""

    def __init__(self, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
        self._server = server
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        """The exit code, and all that was told."""
        code = main(["adapters", *words, "--url", self._server.url])
        captured = self._capsys.readouterr()
        return code, captured.out + captured.err


@pytest.fixture
def shell(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(fake_server, capsys)


def test_adapters_are_loaded_listed_replaced_and_unloaded(shell: Shell, tmp_path: Path) -> None:
    a, b = (write_fake_adapter(tmp_path / name, name) for name in ("a", "b"))
    short_a, short_b = digest_of(a)[:12], digest_of(b)[:12]
    assert shell("ls") == (0, "no adapter is loaded\n")
    told_a, told_b = told_of(a), told_of(b)
    assert shell("load", f"x={a}", f"y={b}") == (0, f"x: loaded {told_a}\ny: loaded {told_b}\n")
    code, refused = shell("load", "x", b)
    assert code == 1
    assert refused.startswith("x: refused: an adapter with this name is loaded already;")
    assert f"lora-serve adapters replace x {b}" in refused
    assert shell("replace", "x", b) == (0, f"x: {short_a} → {told_b}\n")
    assert shell("replace", "x", b)[1] == (
        f"x: unchanged, the same bytes, so cached KV stays warm: {told_b}\n"
    )
    _, table = shell("ls")
    header, x, y = table.splitlines()
    assert header.split() == "name digest gen rank size residency source".split()
    assert (x.split()[:2], x.split()[-2:]) == (["x", short_b], ["resident", b])
    assert y.split()[0] == "y"
    assert [one["digest"] for one in json.loads(shell("ls", "--json")[1])] == [digest_of(b)] * 2
    code, told = shell("unload", "nosuch", "x", "y")
    assert code == 1
    assert told.startswith("x: unloaded\ny: unloaded\nnosuch: refused: ")
    assert shell("ls") == (0, "no adapter is loaded\n")


def test_a_pinned_load_says_what_is_pinned(shell: Shell, tmp_path: Path) -> None:
    path = write_fake_adapter(tmp_path / "a", "a")
    told = told_of(path, pinned=True)
    assert shell("load", "x", path, "--pinned") == (0, f"x: loaded {told}\n")
    assert told in shell("replace", "x", path, "--pinned")[1]


def test_a_change_that_all_servers_have_says_so() -> None:
    reply = Reply("Success", {"X-LoRA-Rollout": "everywhere"})
    assert _changed("x: loaded", reply) == Outcome("x: loaded, everywhere")


def test_a_server_without_a_catalog_has_no_replicas(shell: Shell) -> None:
    code, told = shell("replicas")
    assert (code, told) == (
        0, "the server shares its adapters with no other: it has no --lora-catalog\n",
    )  # fmt: skip
    code, told = shell("forget", "one:8000")
    assert code == 1
    assert told.startswith("one:8000: refused: no replica 'one:8000'")


@pytest.mark.parametrize(
    ("rollout", "shown"),
    [
        ({"everywhere": True, "num_replicas": 3, "replicas": []}, "everywhere"),
        ({"everywhere": False, "num_replicas": 3, "replicas": [{}]}, "2 of 3"),
        ({"everywhere": False}, "–"),
        ("a text", "–"),
    ],
)
def test_a_roll_out_is_listed_beside_its_adapter(
    rollout: object, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Listing:
        def models(self, **_: bool) -> list[ServedModel]:
            facts = {"id": "tenant", "parent": "base", "root": "/a", "rollout": rollout}
            return [ServedModel("tenant", facts)]

    list_adapters(Listing(), argparse.Namespace(json=False))  # type: ignore[arg-type]
    header, row = capsys.readouterr().out.splitlines()
    assert header[header.index("rolled out") :].split() == ["rolled", "out", "source"]
    assert row[header.index("rolled out") :].startswith(shown)


def test_a_change_that_is_not_on_every_server_has_an_exit_code_of_its_own(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal of another name counts for more."""
    a = write_fake_adapter(tmp_path / "a", "a")
    load, unload = LocalNames.load, LocalNames.unload

    def incomplete(name: str) -> Rollout:
        states = ReplicaState("one", "", State.READY), ReplicaState("two", "", State.SILENT, "1 h")
        return Rollout(Record(name=name, serial=7), states)

    async def load_on_one(names: LocalNames, wish: AdapterWish, by: str) -> Loaded:
        return Loaded((await load(names, wish, by)).adapter, incomplete(wish.lora_name))

    async def unload_on_one(names: LocalNames, name: str, by: str) -> Rollout:
        await unload(names, name, by)
        return incomplete(name)

    monkeypatch.setattr(LocalNames, "load", load_on_one)
    monkeypatch.setattr(LocalNames, "unload", unload_on_one)
    for words in (("load", "x", a), ("replace", "x", a), ("unload", "x")):
        code, told = shell(*words)
        assert code == 3, told
        assert "warning: it is on 1 of 2 replicas; not on two (not heard from: 1 h)" in told
    assert shell("load", f"y={a}", "z=/nowhere")[0] == 1


def test_a_change_of_which_too_little_is_known_is_not_told_as_refused(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(names: LocalNames, wish: AdapterWish, by: str) -> Loaded:
        raise ChangeUnknownError("the catalog is gone; 'x' was changed (serial 7)", digest="ab")

    monkeypatch.setattr(LocalNames, "load", lost)
    code, told = shell("load", "x", write_fake_adapter(tmp_path / "a", "a"))
    assert (code, told) == (3, "x: not known: the catalog is gone; 'x' was changed (serial 7)\n")


@pytest.fixture
def leaving_server() -> Iterator[str]:
    """The URL of one that reads the first request and ends, as a process that is killed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def read_one() -> None:
            connection, _ = listening.accept()
            listening.close()
            with connection:
                connection.recv(65536)

        thread = threading.Thread(target=read_one)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def test_a_server_that_is_lost_in_a_change_may_have_made_it(
    leaving_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_fake_adapter(tmp_path / "a", "a")
    words = ["adapters", "load", f"x={path}", f"y={path}", "--url", leaving_server]
    assert main(words) == 1
    lost, refused = capsys.readouterr().err.splitlines()
    assert lost.startswith(f"x: not known: {leaving_server}: the answer broke off")
    assert lost.endswith("it may have been done: see `lora-serve adapters ls`")
    assert refused.startswith(f"y: refused: no server answers at {leaving_server}")


def test_a_change_is_told_although_what_came_of_it_cannot_be_read(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise UnreachableError("gone")

    monkeypatch.setattr(Remote, "models", lost)
    code, told = shell("load", "x", write_fake_adapter(tmp_path / "a", "a"))
    assert (code, told) == (0, "x: loaded (the server does not tell what it has now)\n")


def test_a_name_that_the_server_failed_to_load_is_listed_with_its_state_and_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    card = {"parent": "base", "root": "/a", "digest": "ab" * 32, "state": "failed"}

    class Listing:
        def models(self, *, not_served: bool = False) -> list[ServedModel]:
            assert not_served
            facts = card | {"id": "tenant", "detail": "/a: rank 1024 is\nabove 64"}
            return [ServedModel("tenant", facts), ServedModel("new", card | {"state": "loading"})]

    list_adapters(Listing(), argparse.Namespace(json=False))  # type: ignore[arg-type]
    _, new, tenant, told = capsys.readouterr().out.splitlines()
    assert (new.split()[:2], "loading" in new) == (["new", "ab" * 6], True)
    assert "failed" in tenant.split()
    assert told == "tenant is not served by this server: /a: rank 1024 is\\nabove 64"


def test_on_a_terminal_the_end_of_a_long_path_is_listed(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_fake_adapter(tmp_path / ("long" * 20) / "the-end", "a")
    shell("load", "tenant", path)
    assert path in shell("ls")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    header, row = shell("ls")[1].splitlines()
    assert (len(row), row[header.index("source")]) == (80, "…")
    assert row.endswith("long/the-end")


def test_a_server_without_tls_is_told_from_none(fake_server: FakeServer) -> None:
    url = fake_server.url.replace("http:", "https:")
    with (
        pytest.raises(UnreachableError, match=f"{url} does not speak TLS"),
        Remote(url, None) as remote,
    ):
        remote.models()


def test_a_name_that_is_not_loaded_cannot_be_replaced(shell: Shell, tmp_path: Path) -> None:
    a = write_fake_adapter(tmp_path / "a", "a")
    shell("load", "tenant", a)
    code, told = shell("replace", "tenat", a)
    assert code == 1
    assert "did you mean tenant?" in told
    assert shell("load", "tenant")[0] == 2
    assert shell("load", "a", "b", "c")[0] == 2


def test_rollback_loads_the_bytes_that_stood_there_before_or_nothing(
    shell: Shell, tmp_path: Path
) -> None:
    a, b = (write_fake_adapter(tmp_path / name, name) for name in ("a", "b"))
    short_a, short_b = digest_of(a)[:12], digest_of(b)[:12]
    shell("load", "x", a)
    code, told = shell("rollback", "x")
    assert code == 1, told
    assert "remembers no earlier version" in told
    shell("replace", "x", b)
    shell("replace", "x", "/nowhere")  # what failed is no version
    shell("replace", "x", b)  # nor is what changed nothing
    told_a = told_of(a)
    assert shell("rollback", "x") == (0, f"x: {digest_of(b)[:12]} → {told_a}\n")
    shell("unload", "x")
    assert shell("rollback", "x") == (0, f"x: loaded {told_a}\n")
    shell("replace", "x", b)
    write_fake_adapter(tmp_path / "a", "overwritten")
    code, told = shell("rollback", "x")
    assert code == 1
    assert f"{a} no longer holds version {short_a}: its files have changed; put that" in told
    assert f"lora-serve adapters replace x {a}" in told
    assert short_b in shell("ls")[1]


def test_verify_tells_what_an_adapter_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_adapter(tmp_path / "good", lora_tensors(MODULES))
    assert main(["adapters", "verify", path, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["rank"], report["modules"]) == (4, sorted(MODULES))
    assert main(["adapters", "verify", path]) == 0
    told = capsys.readouterr().out
    assert "good by itself" in told
    assert report["digest"] in told
    assert "2: down_proj × 1, q_proj × 1" in told
    assert "ignored" not in told
    path = write_adapter(tmp_path / "part", lora_tensors(MODULES), {"target_modules": ["q_proj"]})
    assert main(["adapters", "verify", path]) == 0
    told = capsys.readouterr().out
    assert "1: q_proj × 1" in told
    assert "ignored  2 tensors, by its config as by PEFT: 'base_model.model." in told


def test_verify_tells_of_all_tensors_that_an_adapter_may_have(
    adapter_paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = Vocabulary("model.embed_tokens", "lm_head", 100, 8, is_tied=True)
    path = str(write_extended(adapter_paths[0], vocabulary, {}, tmp_path))
    assert main(["adapters", "verify", path, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert all(report[name] for name in whole_checkpoint().tensor_fields)
    assert main(["adapters", "verify", path]) == 0
    assert re.search(r"biases   \d+: .*q_proj × \d", capsys.readouterr().out)


def test_verify_compares_an_adapter_with_its_model(
    model_path: Path, adapter_paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", "verify", *map(str, adapter_paths), "--base", str(model_path)]) == 0
    assert capsys.readouterr().out.count(f"good, for {model_path}") == len(adapter_paths)
    other = write_adapter(tmp_path / "other", lora_tensors(MODULES), {"use_dora": True})
    assert main(["adapters", "verify", other, "/nowhere", "--base", str(model_path)]) == 1
    told = capsys.readouterr().out
    assert "  - shapes that do not fit this model" in told
    assert "use_dora" in told
    assert "/nowhere: refused\n  - No adapter found for /nowhere" in told


def test_verify_takes_smollm2_by_its_name(
    adapter_paths: list[Path], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.demo.smollm2.ensure_smollm2", lambda _: model_path)
    assert main(["adapters", "verify", str(adapter_paths[0]), "--base", "smollm2"]) == 0


def test_verify_refuses_a_rank_above_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_adapter(tmp_path / "good", lora_tensors(MODULES))
    assert main(["adapters", "verify", path, "--max-lora-rank", "2"]) == 1
    assert "LoRA rank 4 is greater than max_lora_rank 2" in capsys.readouterr().out
