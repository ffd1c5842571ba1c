"""The scripts of `lora-serve completion` in real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_serve.cli.completion_scripts import SCRIPTS
from lora_serve.cli.completion_tree import completion_tree
from lora_serve.cli.main import COMMANDS, parser_of_all
from tests.fakes.terminal import Terminal

CASES = [
    ("lora-serve ser", "serve"),
    ("lora-serve kv ver", "verify"),
    ("lora-serve kv clear --older", "--older-than"),
    ("lora-serve serve --kv-cache-mem", "--kv-cache-memory-bytes"),
    ("lora-serve serve --dtype bf", "bfloat16"),
    ("lora-serve completion fi", "fish"),
    ("lora-serve adapters roll", "rollback"),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("completion")
    tree = completion_tree(parser_of_all())
    for shell, script in SCRIPTS.items():
        (directory / f"lora-serve.{shell}").write_text(script(tree))
    return directory


def require(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"*** NO {shell.upper()}: its completion is not tested ***")
    return found


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_what_was_begun(shell: str, scripts: Path, tmp_path: Path) -> None:
    script = scripts / f"lora-serve.{shell}"
    begin = "" if shell == "bash" else "autoload -Uz compinit; compinit -u -D; "
    command = [require(shell), *(("--norc", "--noprofile") if shell == "bash" else ("-f",)), "-i"]
    with Terminal(command, columns=200) as terminal:
        terminal.type(f"{begin}PS1='ready> '; cd {tmp_path}; source {script}\r")
        terminal.expect(r"ready> (\x1b\[K)?(\x1b\[\?2004h)?$")
        for line, word in CASES:
            terminal.type(f"{line}\t")
            terminal.expect(rf"{word}(\x1b\[1m)? ")  # zsh shows the space in bold
            terminal.type("\x15")  # begins the line anew
        (tmp_path / "prompts.jsonl").touch()
        terminal.type("lora-serve kv ls prom\t")
        terminal.expect("prompts.jsonl")


def test_fish_completes_what_was_begun(scripts: Path) -> None:
    script = scripts / "lora-serve.fish"
    asked = "; ".join(f"complete -C '{line}'" for line, _ in CASES)
    done = subprocess.run(
        [require("fish"), "--no-config", "-c", f"source {script}; {asked}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [word for _, word in CASES]


def test_every_command_and_flag_is_known_but_those_without_effect(scripts: Path) -> None:
    places = {place.path: place for place in completion_tree(parser_of_all())}
    assert {name for name, _ in places[""].commands} == set(COMMANDS)
    names = {name for flag in places["/serve"].flags for name in flag.names}
    assert "--max-loras" in names
    assert "--trust-remote-code" not in names
    assert places["/kv/ls"].takes_paths


def test_the_command_prints_the_script(scripts: Path) -> None:
    command = [sys.executable, "-m", "lora_serve.cli.main", "completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == (scripts / "lora-serve.bash").read_text()
