"""What the command answers before anything heavy is imported; it runs in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lora_serve import __version__
from lora_serve.cli.main import COMMANDS, main
from lora_serve.cli.parser import OneLineParser

# Any of these takes a good part of the 0.3 s in which help is to come, or ten times as long.
HEAVY = {
    *("torch", "transformers", "peft", "numpy", "triton", "safetensors", "huggingface_hub"),
    *("fastapi", "pydantic", "uvicorn", "httpx", "zmq", "redis", "jinja2", "prometheus_client"),
    *("asyncio", "msgspec", "matplotlib", "multiprocessing"),
}


def run(command: str) -> tuple[int, str, set[str]]:
    """Run `lora-serve`: its exit code, what it printed, and the packages that it imported."""
    words = [sys.executable, "-X", "importtime", "-m", "lora_serve.cli.main", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in lines
        if line.startswith("import time:")
    }
    told = [line for line in lines if not line.startswith("import time:")]
    return done.returncode, done.stdout + "\n".join(told), imported


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("", 0, "COMMAND"),
        ("--help", 0, "COMMAND"),
        ("--version", 0, f"lora-serve {__version__}"),
        ("sreve", 2, "did you mean serve?"),
        ("org/model", 2, "to serve a model: lora-serve serve org/model"),
        ("--verison", 2, "did you mean --version?"),
        ("serve --help", 0, "--max-loras"),
        ("serve --port abc", 2, "argument --port: want a whole number such as 8, got 'abc'"),
        ("bench serve --request-rate x", 2, "--request-rate: want a number such as 0.5, got 'x'"),
        ("serve --max-lora 3", 2, "did you mean --max-loras?"),
        ("serve --bogus", 2, "unknown argument --bogus (lora-serve serve --help lists all)"),
        ("demo --help", 0, "--keep"),
        ("bench --help", 0, "latency"),
        ("bench serve --help", 0, "--request-rate"),
        ("bench sreve", 2, "did you mean serve?"),
        ("simulate --help", 0, "--find-replicas"),
        ("simulate fit --help", 0, "--output"),
        ("adapters --help", 0, "rollback"),
        ("adapters verify --help", 0, "--base"),
        ("adapters replace --help", 0, "NAME=PATH"),
        ("doctor --help", 0, "MODEL"),
        ("completion --help", 0, "fpath"),
        ("completion fsh", 2, "did you mean fish?"),
        ("completion bash", 0, "complete -F _lora_serve lora-serve"),
        ("top --help", 0, "--once"),
        ("chat --help", 0, "/help"),
        ("chat --modle x", 2, "did you mean --model?"),
        ("fuzz --help", 0, "--oracle"),
        ("check --help", 0, "--tolerance"),
        ("kv --help", 0, "verify"),
        ("kv clear --help", 0, "--older-than"),
        ("kv clea", 2, "did you mean clear?"),
        ("kv clear", 2, "PATH|URL is missing: a --kv-disk-path, or a --kv-redis-url (lora-serve"),
        ("kv clear --kv_disk_path=/kv", 2, "--kv-disk-path: give the path, or the redis:// URL"),
        ("kv ls /a /b", 2, "one argument too many: /b"),
        ("adapters", 2, "ACTION is missing: one of ls, load,"),
        ("adapters verify --url http://x", 2, "--url: verify reads directories of this machine"),
        ("adapters --url http://x ls", 2, "--url: stands behind the action"),
        ("convert --help", 0, "--max-error"),
        ("merge --help", 0, "ADAPTER"),
        ("merge one two", 2, "OUT"),
    ],
)
def test_help_and_typos_import_nothing_heavy(command: str, code: int, words: str) -> None:
    returned, told, imported = run(command)
    assert (returned, imported & HEAVY) == (code, set())
    assert words in told


def test_looking_into_a_disk_tier_imports_no_more_than_that_takes() -> None:
    _, told, imported = run("kv ls /nowhere")
    assert imported & HEAVY == {"msgspec"}
    assert "/nowhere" in told


def test_every_command_is_a_module_that_adds_its_arguments() -> None:
    for name in COMMANDS:
        parser = OneLineParser(prog=f"lora-serve {name}")
        import_module(f"lora_serve.cli.{name}").add_arguments(parser)
        assert parser.description, name


def test_a_command_is_found_behind_a_flag_that_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--verbose", "kv", "ls", "."])
    assert caught.value.code == 2
    assert "unknown argument --verbose" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_while_the_command_is_imported_tells_nothing(tmp_path: Path) -> None:
    """The parser, which `main` imports, sends the signal that a terminal would."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "lora_serve.cli.parser":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from lora_serve.cli.entry import main
sys.argv = ["lora-serve", "--version"]
main()
print("went on")
"""
