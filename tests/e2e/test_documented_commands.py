"""Every command of the documents runs, on one server for all of them.

A block of code in bash, sh or Python is run as it stands, but for what `Place.adapt` replaces, with
each `lora-serve serve` only given to the program's parser. A block that cannot be run here says so
in the line before it: `<!-- not run: REASON -->`. Python is `warm_python`, since most commands take
longer to import than to run.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer
from tests.e2e.warm_python import warm_python

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<kind>bash|sh|python)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PRELUDE = """
set -euo pipefail
curl() { command curl --fail-with-body -sS "$@"; echo; }
warm() { command "${PYTHON[@]}" "$@"; }
python3() { warm "$@"; }
python() { case $1 in examples/*) warm "$@" --url "$URL";; *) warm "$@";; esac; }
lora-serve() {
  case "$1 ${2-}" in
    serve*) warm -c "$PARSE" "$@";;
    "kv clear") warm -m lora_serve.cli.main "$@" --yes;;
    "adapters verify") warm -m lora_serve.cli.main "$@";;
    adapters*) warm -m lora_serve.cli.main "$@" --url "$URL";;
    *) warm -m lora_serve.cli.main "$@";;
  esac
}
"""
PARSE = "import sys; from tests.deploy.command_lines import parsed; parsed(sys.argv[1:])"
ENVIRONMENT = {
    "PARSE": PARSE,
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": str(ROOT),
    "HOME": str(Path.home()),
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}
NAMES = ("alpha", "beta", "tenant-a", "tenant-b")
SECONDS = 240


@dataclass(frozen=True)
class Place:
    """Where the commands run: a directory with adapters/a and adapters/b, and a server.

    python: the beginning of the command that runs Python.
    """

    directory: Path
    model: Path
    server: ServerProcess
    python: tuple[str, ...]

    def run(self, code: str, kind: str = "bash") -> subprocess.CompletedProcess[str]:
        """Run a block of code of a document, with what stands in for its programs."""
        adapted = self.adapt(code)
        head = f"PYTHON=({shlex.join(self.python)})\n{PRELUDE}"
        command = ["bash", "-c", head + adapted]
        if kind == "python":
            command = [*self.python, "-c", adapted]
        return subprocess.run(
            command,
            cwd=self.directory,
            env=ENVIRONMENT | {"URL": self.server.base_url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def adapt(self, code: str) -> str:
        """The code with this server's address, and with files that there are."""
        for written, here in (
            ("http://localhost:8000", self.server.base_url),
            ("localhost:8000", self.server.base_url),
            ("Qwen/Qwen2.5-0.5B-Instruct", str(self.model)),
            ('"adapters/', f'"{self.directory}/adapters/'),
            (" adapters/", f" {self.directory}/adapters/"),
            ("=adapters/", f"={self.directory}/adapters/"),
            ("--base MODEL", f"--base {self.model}"),
            ("/var/cache/lora-serve", f"{self.directory}/kv"),
            ("redis://cache:6379/0", f"{self.directory}/kv"),
        ):
            code = code.replace(written, here)
        return code


@pytest.fixture(scope="module")
def place(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    if shutil.which("curl") is None:
        pytest.skip("*** THE DOCUMENTS' COMMANDS ARE NOT RUN: curl is missing ***")
    directory = tmp_path_factory.mktemp("commands")
    for name, path in (("a", demo_paths.alpha), ("a2", demo_paths.beta), ("b", demo_paths.beta)):
        shutil.copytree(path, directory / "adapters" / name)
    (directory / "examples").symlink_to(ROOT / "examples")
    flags = (
        *("--enable-lora", "--kv-disk-path", str(directory / "kv")),
        *("--lora-modules", f"alpha={demo_paths.alpha}", f"beta={demo_paths.beta}"),
    )
    with (
        start_server(demo_paths.model, directory / "log", *flags) as server,
        warm_python(directory, ENVIRONMENT) as python,
    ):
        server.wait_until_healthy()
        store_something(server, directory / "kv")
        yield Place(directory, demo_paths.model, server, python)


def store_something(server: ServerProcess, kv: Path) -> None:
    """Have the disk tier hold a prompt's KV, for the commands that look into it."""
    body = {"prompt": list(range(20, 84)), "max_tokens": 1}
    url = f"{server.base_url}/v1/completions"
    httpx.post(url, json=body, timeout=60).raise_for_status()
    ends = time.monotonic() + 60
    while "block" not in (told := list_kv(kv)):
        assert time.monotonic() < ends, told
        time.sleep(0.2)


def list_kv(kv: Path) -> str:
    command = [sys.executable, "-m", "lora_serve.cli.main", "kv", "ls", str(kv)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.fixture
def adapters(place: Place, demo_paths: DemoPaths) -> None:
    """Each document begins with alpha, beta, tenant-a and tenant-b, and no other adapter."""
    with httpx.Client(base_url=place.server.base_url, timeout=60) as client:
        for model in client.get("/v1/models").json()["data"]:
            if model["parent"] is not None and model["id"] not in NAMES:
                client.post("/v1/unload_lora_adapter", json={"lora_name": model["id"]})
        for name in NAMES:
            path = demo_paths.beta if name in ("beta", "tenant-b") else demo_paths.alpha
            body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
            client.post("/v1/load_lora_adapter", json=body).raise_for_status()


def blocks(document: Path) -> list[tuple[str, str]]:
    """The kind and the code of each block that is to run."""
    found = BLOCK.finditer(document.read_text())
    return [(match["kind"], match["code"]) for match in found if match["why"] is None]


WITH_COMMANDS = [path for path in DOCUMENTS if blocks(path)]


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.name)
def test_every_command_runs(document: Path, place: Place, adapters: None) -> None:
    for kind, code in blocks(document):
        done = place.run(code, kind)
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_a_command_that_fails_would_be_found(place: Place) -> None:
    for wrong in ("lora-serve serve --nosuch", "curl localhost:8000/nosuch", "nosuch | cat"):
        assert place.run(wrong).returncode != 0
    assert place.run("raise SystemExit(3)", "python").returncode == 3
    assert "ZeroDivisionError" in place.run("1 / 0", "python").stderr


def test_answers_in_the_quickstart_are_as_it_says(place: Place, adapters: None) -> None:
    quickstart = ROOT / "docs" / "quickstart.md"
    ask, replace = (code for _, code in blocks(quickstart) if code.startswith(("curl", "beta=")))
    labels = re.findall(r"`([A-Z_]+_VERSION_[AB])`", quickstart.read_text())
    assert len(labels) == 2
    for label, code in zip(labels, (ask, replace + ask), strict=True):
        done = place.run(code)
        assert label in done.stdout, done.stderr
