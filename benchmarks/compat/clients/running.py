"""Install a client, run its script against a server, and read what it says of each path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.compat.clients.inventory import NODE, SCRIPTS, Client
from benchmarks.peers.environment import Environment, create_venv, ensure_environment

MARK = "@path "
MOST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What came of each path: "" if it went, otherwise the reason. start: of the script itself."""

    name: str
    version: str = ""
    reasons: dict[str, str] = field(default_factory=dict)


def install_client(client: Client, environments: Path) -> Environment:
    """The client's environment, which is made if it is not there."""
    environment = Environment(environments / Path(client.script).stem)
    recipe = " ".join(client.packages)
    if client.is_for_node:
        ensure_environment(environment.root, recipe, lambda e: _npm(e, client), lambda venv: None)
    else:
        ensure_environment(environment.root, recipe, lambda e: e.pip(*client.packages), create_venv)
    return environment


def _npm(environment: Environment, client: Client) -> None:
    environment.run(["npm", "install", "--prefix", ".", NODE, *client.packages])


def run_client(
    client: Client, environment: Environment, variables: Mapping[str, str], patience: float
) -> ClientResult:
    """What the script says of its paths, as far as it came within `patience` seconds."""
    command = _node(client, environment) if client.is_for_node else _python(client, environment)
    try:
        done = subprocess.run(
            command,
            cwd=environment.root,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience,
        )
        out, reason = done.stdout, f"the script ended with {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        out, reason = expired.stdout or b"", f"did not end within {patience:g} s"
        done = None
    (environment.root / "run.log").write_bytes(out)
    reasons = read_paths(text := out.decode(errors="replace"))
    if done is None or done.returncode or not reasons:
        last = " / ".join(text.strip().splitlines()[-2:])
        reasons["start"] = f"{reason}: {last}"[:MOST_REASON]
    return ClientResult(client.name, _version(client, environment), reasons)


def read_paths(text: str) -> dict[str, str]:
    """What the lines that client_paths prints say, among whatever else a client prints."""
    lines = (json.loads(line[len(MARK) :]) for line in text.splitlines() if line.startswith(MARK))
    return {line["path"]: " ".join(line["reason"].split())[:MOST_REASON] for line in lines}


def _python(client: Client, environment: Environment) -> list[str]:
    return [str(environment.python), str(SCRIPTS / client.script)]


def _node(client: Client, environment: Environment) -> list[str]:
    """Run a copy: Node looks for packages beside the script."""
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, environment.root)
    return [str(environment.root / "node_modules" / ".bin" / "node"), client.script]


def _version(client: Client, environment: Environment) -> str:
    name = client.packages[0].partition("[")[0]
    if client.is_for_node:
        name = name.rpartition("@")[0] or name  # a scope begins with the sign, a version follows it
        package = environment.root / "node_modules" / name / "package.json"
        return str(json.loads(package.read_text())["version"])
    folders = [str(path) for path in environment.root.glob("venv/lib/python*/site-packages")]
    return next(found.version for found in distributions(name=name, path=folders))
