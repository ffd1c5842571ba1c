from __future__ import annotations

import json
import os
import time
from io import StringIO
from pathlib import Path

import pytest

from lora_serve.cli.kv_actions import age_text, size_text
from lora_serve.cli.main import main
from lora_serve.demo.server_process import free_port
from lora_serve.kv_tiers.base import Record, Tier, TierNamespace
from lora_serve.kv_tiers.codec import make_record
from lora_serve.kv_tiers.disk.tier import DiskTier
from lora_serve.kv_tiers.redis.keyspace import NAMESPACES
from lora_serve.kv_tiers.redis.tier import RedisTier
from tests.fakes.kv_blocks import a_namespace, blocks, chain
from tests.fakes.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

A, B, BASE = a_namespace("a", "A"), a_namespace("b", "B", generation=2, salt="s"), a_namespace("")


def save(tier: Tier, namespace: TierNamespace, count: int) -> None:
    hashes = chain(namespace, "p", count)
    an_hour_ago = time.time() - 3600
    tier.save(
        namespace,
        [make_record(namespace, h, block, an_hour_ago) for h, block in blocks(namespace, hashes)],
    )


def fill(tier: Tier) -> None:
    for namespace, count in ((A, 4), (B, 6), (BASE, 8)):
        save(tier, namespace, count)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tier = DiskTier(tmp_path, 2**20)
    fill(tier)
    tier.close()
    return tmp_path


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    tier = RedisTier(redis_server.url, 5.0)
    fill(tier)
    tier.close()
    return redis_server.url


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_ls_shows_adapters_versions_and_salts(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "ls", str(path)]) == 0
    head, base, a, b = lines(capsys)
    assert head == "adapter version gen salt model blocks size oldest newest".split()
    assert base[:5] == ["(base", "model)", "–", "–", "–"]
    assert a[:6] == ["a", A.digest.hex()[:12], "0", "–", A.model.hex()[:12], "4"]
    assert b[:4] == ["b", B.digest.hex()[:12], "2", B.salt_digest.hex()[:12]]
    assert a[-4:] == ["1", "h", "1", "h"]


def test_ls_of_redis_shows_the_same(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "ls", url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["adapter"], one["num_blocks"]) for one in listed] == [
        (None, 8),
        ("a", 4),
        ("b", 6),
    ]
    assert listed[2]["digest"] == B.digest.hex()
    assert listed[2]["salt_digest"] == B.salt_digest.hex()


def test_verify_finds_every_block_good(
    path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for where in (str(path), url):
        assert main(["kv", "verify", where]) == 0
        assert [line[-1] for line in lines(capsys)] == ["bad", "none", "none", "none"]


def test_verify_names_the_bad_and_fails(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = path.glob(f"namespaces/{A.root.hex()}/*.kv")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["kv", "verify", str(path), "--json"]) == 1
    judged = {one["adapter"]: one for one in json.loads(capsys.readouterr().out)}
    assert (judged["a"]["num_good"], judged["a"]["refused"]) == (3, {"checksum": 1})
    assert judged["b"]["refused"] == {}
    assert file.exists()  # it only looks


def test_verify_of_redis_names_the_bad_and_fails(
    url: str, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with redis_server.client() as client:
        key = next(key for key in client.scan_iter() if b":block:" in key)
        client.append(key, b"x")
    assert main(["kv", "verify", url]) == 1
    captured = capsys.readouterr()
    assert "1 truncated" in captured.out
    assert "1 bad: no server will use them" in captured.err


def test_verify_fails_where_a_descriptor_is_damaged(
    path: Path, url: str, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (path / "namespaces" / A.root.hex() / "namespace.json").write_bytes(b"{}")
    with redis_server.client() as client:
        client.hset(NAMESPACES, A.root, b"{}")
    for where in (str(path), url):
        assert main(["kv", "verify", where]) == 1
        assert "1 with a damaged descriptor" in capsys.readouterr().err
        assert main(["kv", "verify", where]) == 1  # it only looks
        assert main(["kv", "clear", where, "--yes"]) == 0
        assert main(["kv", "verify", where]) == 0


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--adapter", "b"), [None, "a"]),
        (("--adapter", ""), ["a", "b"]),
        (("--version", A.digest.hex()[:12]), [None, "b"]),
        (("--salt", B.salt_digest.hex()), [None, "a"]),
        (("--adapter", "a", "--salt", B.salt_digest.hex()), [None, "a", "b"]),
        (("--older-than", "1800"), ["b"]),
        (("--older-than", "30m"), ["b"]),
        (("--older-than", "2h"), [None, "a", "b"]),
    ],
)
def test_clear_deletes_what_the_options_choose(
    path: Path, options: tuple[str, ...], left: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    tier = DiskTier(path, 2**20)
    tier.save(B, records_of_now(B))
    tier.close()
    assert main(["kv", "clear", str(path), *options, "--yes"]) == 0
    capsys.readouterr()
    assert main(["kv", "ls", str(path), "--json"]) == 0
    assert [one["adapter"] for one in json.loads(capsys.readouterr().out)] == left


@pytest.mark.parametrize(
    "option", ["--version=", "--salt=", "--version=xyz", "--older-than=-1", "--older-than=nan"]
)
def test_clear_refuses_what_chooses_nothing_in_particular(
    path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["kv", "clear", str(path), option])
    assert ended.value.code == 2
    assert option.partition("=")[0] in capsys.readouterr().err
    assert main(["kv", "ls", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


def records_of_now(namespace: TierNamespace) -> list[Record]:
    hashes = chain(namespace, "of now", 2)
    return [make_record(namespace, h, block, time.time()) for h, block in blocks(namespace, hashes)]


def test_clear_deletes_one_adapter_or_everything(
    path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for where in (str(path), url):
        assert main(["kv", "clear", where, "--adapter", "a", "--yes"]) == 0
        assert capsys.readouterr().out.startswith("deleted 4 blocks, ")
        assert main(["kv", "clear", where, "--yes"]) == 0
        assert capsys.readouterr().out.startswith("deleted 14 blocks, ")
        assert main(["kv", "ls", where]) == 0
        assert capsys.readouterr().out == "nothing is stored here\n"


def test_clear_without_a_terminal_deletes_nothing_unless_told(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("y\n"))
    assert main(["kv", "clear", str(path)]) == 2
    assert "delete 18 blocks" in capsys.readouterr().err
    assert main(["kv", "clear", str(path), "--adapter", "a", "--dry-run"]) == 0
    table, told = capsys.readouterr().out.splitlines()[1:]
    assert table.startswith("a ")
    assert told.startswith("would delete 4 blocks, ")
    assert num_blocks(path, capsys) == 18


@pytest.mark.parametrize(("answer", "left"), [("y", 14), ("", 18), ("no", 18)])
def test_clear_asks_on_a_terminal(
    path: Path,
    answer: str,
    left: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["kv", "clear", str(path), "--adapter", "a"]) == (0 if left == 14 else 1)
    assert "Delete 4 blocks, " in capsys.readouterr().out
    assert num_blocks(path, capsys) == left


def num_blocks(path: Path, capsys: pytest.CaptureFixture[str]) -> int:
    assert main(["kv", "ls", str(path), "--json"]) == 0
    return sum(one["num_blocks"] for one in json.loads(capsys.readouterr().out))


def test_a_server_goes_on_while_its_directory_is_cleared(path: Path) -> None:
    tier = DiskTier(path, 2**20)
    tier.wait_until_indexed()
    assert len(tier.load(A, chain(A, "p", 4)).records) == 4
    assert main(["kv", "clear", str(path), "--yes"]) == 0
    assert tier.load(A, chain(A, "p", 4)).records == ()
    save(tier, A, 4)
    assert len(tier.load(A, chain(A, "p", 4)).records) == 4
    tier.close()


def test_stats_add_up(path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for where, fact in ((str(path), "files             3"), (url, "evicted keys      0")):
        assert main(["kv", "stats", where]) == 0
        out = capsys.readouterr().out
        assert "all                  3      1      18" in out
        assert fact in out
    assert main(["kv", "stats", str(path), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["tier"]["files"] == 3
    assert all(3600 <= time.time() - one["newest"] < 4000 for one in stats["adapters"])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("/nowhere", "/nowhere: no KV is stored here; name the --kv-disk-path of a server"),
        ("redis://:secret@127.0.0.1:1", "redis://127.0.0.1:1: Redis: Error 111 connecting"),
        ("http://host", "no place of a KV tier; name a directory or a URL of redis://"),
    ],
)
def test_what_cannot_be_looked_into_is_told_in_one_line(
    where: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "ls", where]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "secret" not in error
    assert error.count("\n") == 1


def test_sizes_and_ages_are_for_people() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
    ]
    ages = [age_text(written, 100_000.0) for written in (100_001.0, 99_990.0, 99_880.0, 0.0, None)]
    assert ages == ["0 s", "10 s", "2 min", "1 d", "–"]


@pytest.mark.parametrize("planted", ["namespaces", "trash", "quarantine"])
def test_no_command_follows_a_planted_link(tmp_path: Path, planted: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / A.root.hex()).mkdir(parents=True)
    (elsewhere / A.root.hex() / "precious.kv").write_text("data")
    (elsewhere / "precious.kv").write_text("data")
    kv = tmp_path / "kv"
    (kv / "namespaces").mkdir(parents=True)
    if planted == "namespaces":
        (kv / planted).rmdir()
    (kv / planted).symlink_to(elsewhere)
    for action in ("ls", "verify", "stats", "clear"):
        main(["kv", action, str(kv), *(["--yes"] if action == "clear" else [])])
    assert sorted(one.name for one in elsewhere.rglob("*.kv")) == ["precious.kv"] * 2


def test_a_directory_of_any_user_may_be_looked_into(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert main(["kv", "verify", str(path)]) == 0


def test_a_redis_that_is_not_there_is_told_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    assert main(["kv", "ls", url]) == 2
    told = capsys.readouterr().err
    assert "Connection refused; see that it runs, and that the address and the pass" in told
    assert "secret" not in told
