"""A directory is whole or absent, however it is built and whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_serve.demo.cache import build_once, cache_root, is_whole


class Builder:
    """Writes two files, and counts how often."""

    def __init__(self) -> None:
        self.num_builds = 0

    def __call__(self, directory: Path) -> None:
        self.num_builds += 1
        (directory / "sub").mkdir()
        (directory / "sub/weights").write_bytes(b"1234")
        (directory / "config").write_text(f"build {self.num_builds}")


def ignore(line: str) -> None:
    pass


def build(directory: Path, builder: Builder) -> None:
    build_once(directory, builder, ignore)


def test_a_second_call_builds_nothing(tmp_path: Path) -> None:
    builder = Builder()
    build(tmp_path / "cache/demo", builder)
    build(tmp_path / "cache/demo", builder)
    assert builder.num_builds == 1
    assert (tmp_path / "cache/demo/sub/weights").read_bytes() == b"1234"


def damage_by_flipping(directory: Path) -> None:
    (directory / "sub/weights").write_bytes(b"1235")


def damage_by_truncating(directory: Path) -> None:
    (directory / "sub/weights").write_bytes(b"")


def damage_by_removing(directory: Path) -> None:
    (directory / "sub/weights").unlink()


def damage_by_losing_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def damage_by_breaking_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text('{"config": ')


def damage_by_emptying_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("{}")


def damage_by_another_kind_of_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text(json.dumps(["config"]))


@pytest.mark.parametrize(
    "damage",
    [
        damage_by_flipping,
        damage_by_truncating,
        damage_by_removing,
        damage_by_losing_the_manifest,
        damage_by_breaking_the_manifest,
        damage_by_emptying_the_manifest,
        damage_by_another_kind_of_manifest,
    ],
)
def test_a_damaged_directory_is_built_again(tmp_path: Path, damage: object) -> None:
    builder = Builder()
    build(tmp_path / "demo", builder)
    assert callable(damage)
    damage(tmp_path / "demo")
    build(tmp_path / "demo", builder)
    assert (tmp_path / "demo/config").read_text() == "build 2"
    assert is_whole(tmp_path / "demo")


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        build_once(tmp_path / "demo", fail, ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.lock"]
    build(tmp_path / "demo", Builder())
    assert is_whole(tmp_path / "demo")


def test_concurrent_first_uses_build_once(tmp_path: Path) -> None:
    builder = Builder()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: build(tmp_path / "demo", builder), range(8)))
    assert builder.num_builds == 1


def test_who_waits_for_another_is_told_and_takes_what_that_one_built(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from lora_serve.demo.cache import build_once\n"
        "def build(directory):\n"
        "    print('building', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    (directory / 'by').write_text('the other process')\n"
        "build_once(Path(sys.argv[1]), build, print)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "demo")]
    lines: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"building\n"

        def let_it_finish(line: str) -> None:
            lines.append(line)
            assert other.stdin is not None
            other.stdin.write(b"go\n")
            other.stdin.flush()

        build_once(tmp_path / "demo", Builder(), let_it_finish)
    assert (tmp_path / "demo/by").read_text() == "the other process"
    assert len(lines) == 1
    assert "demo.lock" in lines[0]


def test_a_killed_builder_blocks_no_other_and_its_remains_go(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from lora_serve.demo.cache import build_once\n"
        "def build(directory):\n"
        "    (directory / 'half').write_text('half')\n"
        "    print('building', flush=True)\n"
        "    time.sleep(60)\n"
        "build_once(Path(sys.argv[1]), build, print)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"building\n"
        os.kill(other.pid, signal.SIGKILL)
    build(tmp_path / "demo", Builder())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.lock"]


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/lora-serve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_root() == Path("/home/ada/.cache/lora-serve")
