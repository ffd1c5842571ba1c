"""A run of `lora-serve demo`: the model, its servers, the scenarios and their table.

Everything goes over HTTP to real server processes, as in the report whose table it plays.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from lora_serve.cli.demo_table import DemoTable
from lora_serve.demo.client import Client
from lora_serve.demo.model import DemoPaths, ensure_demo
from lora_serve.demo.player import Outcome, Player
from lora_serve.demo.scenarios import Scenario, Server, in_playing_order, server_flags
from lora_serve.demo.server_process import ServerDiedError, ServerProcess
from lora_serve.demo.stage import Stage

EXIT_FAILED = 1


def run_demo(args: argparse.Namespace) -> int:
    """0 if every scenario passed. Servers are gone afterwards, however it ends."""
    signal.signal(signal.SIGTERM, _interrupt)
    table = DemoTable(sys.stdout, colours=_wants_colours())
    paths = ensure_demo(lambda line: print(line, file=sys.stderr, flush=True))
    workspace = Path(tempfile.mkdtemp(prefix="lora-serve-demo-"))
    passed, keep_logs = False, True
    try:
        with Stage(paths.model, workspace, {Server.CACHED: args.port}) as stage:
            passed = _play_all(stage, paths, workspace, table)
            keep_logs = not passed
            if args.keep and passed:
                _keep(stage.start(Server.CACHED), paths)
    except ServerDiedError as error:
        print(f"lora-serve demo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        keep_logs = False
        raise
    finally:
        if keep_logs:
            print(f"server logs: {workspace}", file=sys.stderr)
        else:
            shutil.rmtree(workspace)
    return 0 if passed else EXIT_FAILED


def _play_all(stage: Stage, paths: DemoPaths, workspace: Path, table: DemoTable) -> bool:
    """Group by group, while the next group's server already starts. The last server stays."""
    scenarios = in_playing_order()
    groups = [(server, list(rows)) for server, rows in groupby(scenarios, lambda s: s.server)]
    table.start([scenario.title for scenario in scenarios])
    outcomes: list[Outcome] = []
    for index, (server, group) in enumerate(groups):
        process = stage.start(server)
        process.wait_until_healthy()
        is_last = index + 1 == len(groups)
        if not is_last:
            stage.start(groups[index + 1][0])
        table.server(server_flags(server))
        outcomes.extend(_play_group(process, group, paths, workspace, table))
        if not is_last:
            stage.stop(server)
    table.summary(outcomes)
    return all(outcome.passed for outcome in outcomes)


def _play_group(
    process: ServerProcess,
    scenarios: list[Scenario],
    paths: DemoPaths,
    workspace: Path,
    table: DemoTable,
) -> Iterator[Outcome]:
    with Client(process.base_url) as client:
        player = Player(client, paths, workspace)
        for scenario in scenarios:
            table.begin(scenario)
            outcome = player.play(scenario)
            table.end(outcome)
            yield outcome


def _keep(process: ServerProcess, paths: DemoPaths) -> None:
    """Load alpha as "demo", say what to try, and wait until the user stops it."""
    with Client(process.base_url) as client:
        client.load_adapter("demo", paths.alpha)
    chat = {"model": "demo", "messages": [{"role": "user", "content": "What is your label?"}]}
    load = {"lora_name": "demo", "lora_path": str(paths.beta), "load_inplace": True}
    ask_line = _curl(process, "/v1/chat/completions", {**chat, "temperature": 0})
    print(
        "\nThe server stays up; adapter alpha is loaded as demo. Ask it, replace it, ask again:\n"
    )
    print(ask_line, _curl(process, "/v1/load_lora_adapter", load), ask_line, sep="\n")
    print("\nCtrl-C stops the server.", flush=True)
    try:
        process.wait()
    except KeyboardInterrupt:
        print("\nstopping the server")


def _curl(process: ServerProcess, route: str, body: dict[str, Any]) -> str:
    return (
        f"curl -s {process.base_url}{route} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )


def _wants_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
