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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from lora_serve.cli.demo_table import DemoTable
from lora_serve.demo.client import Client
from lora_serve.demo.given_model import (
    QUESTION,
    GivenModel,
    distinct_adapters,
    first_answer,
    given_model,
)
from lora_serve.demo.model import DemoPaths, ensure_demo
from lora_serve.demo.player import Outcome, Player
from lora_serve.demo.questions import LABELS, Questions
from lora_serve.demo.random_adapters import RANK
from lora_serve.demo.scenarios import Scenario, Server, in_playing_order
from lora_serve.demo.server_process import ServerDiedError, ServerProcess
from lora_serve.demo.stage import Stage

EXIT_FAILED = 1
LABEL_QUESTION = "What is your label?"
GIVEN_MODEL_FLAGS = ("--max-model-len", "2048")  # its prompts are shorter than the demo model's


@dataclass(frozen=True, slots=True)
class _Show:
    """What is played: a model with two adapters, what they are asked, and what to try in a chat."""

    paths: DemoPaths
    questions: Questions
    chat_question: str


_Prepare = Callable[[Stage, Path], _Show]


def run_demo(args: argparse.Namespace) -> int:
    """0 if every scenario passed. Servers are gone afterwards, however it ends."""
    signal.signal(signal.SIGTERM, _interrupt)
    table = DemoTable(sys.stdout, colours=_wants_colours())
    model, flags, prepare = _given(args.model) if args.model else _own()
    workspace = Path(tempfile.mkdtemp(prefix="lora-serve-demo-"))
    passed, keep_logs = False, True
    try:
        with Stage(model, workspace, {Server.CACHED: args.port}, flags) as stage:
            show = prepare(stage, workspace)
            passed = _play_all(stage, show, workspace, table)
            keep_logs = not passed
            if args.keep and passed:
                _keep(stage.start(Server.CACHED), show)
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


def _own() -> tuple[Path, Sequence[str], _Prepare]:
    """The demo's own model, flags for its servers, and what is played."""
    paths = ensure_demo(_progress)
    return paths.model, (), lambda *_: _Show(paths, LABELS, LABEL_QUESTION)


def _given(model: str) -> tuple[Path, Sequence[str], _Prepare]:
    """Likewise, of a model that the user names."""
    given = given_model(model, _progress)
    flags = (*GIVEN_MODEL_FLAGS, *given.flags)
    return Path(given.model), flags, lambda stage, place: _made_up(stage, given, place)


def _made_up(stage: Stage, given: GivenModel, workspace: Path) -> _Show:
    """Show the model's first answer, and make adapters up for it."""
    process = stage.start(Server.UNCACHED)  # the first of all to be played on
    process.wait_until_healthy()
    with Client(process.base_url) as client:
        name = Path(given.model).name
        print(f"The first answer of {name}:\n  {first_answer(client)}\n", flush=True)
        alpha, beta, questions, gain = distinct_adapters(client, given, workspace)
    print(
        f"Its adapters A and B are random numbers of rank {RANK} and strength {gain:g}. They have "
        "learnt nothing: they\nonly make it go on otherwise with a text, and A, B and the model "
        "itself in three ways. What each\nsays on a server without a prefix cache is what it must "
        "say in every row.\n",
        flush=True,
    )
    return _Show(DemoPaths(Path(given.model), alpha, beta), questions, QUESTION)


def _play_all(stage: Stage, show: _Show, workspace: Path, table: DemoTable) -> bool:
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
        table.server(stage.flags_of(server))
        outcomes.extend(_play_group(process, group, show, workspace, table))
        if not is_last:
            stage.stop(server)
    table.summary(outcomes)
    return all(outcome.passed for outcome in outcomes)


def _play_group(
    process: ServerProcess,
    scenarios: list[Scenario],
    show: _Show,
    workspace: Path,
    table: DemoTable,
) -> Iterator[Outcome]:
    with Client(process.base_url) as client:
        player = Player(client, show.paths, workspace, show.questions)
        for scenario in scenarios:
            table.begin(scenario)
            outcome = player.play(scenario)
            table.end(outcome)
            yield outcome


def _keep(process: ServerProcess, show: _Show) -> None:
    """Load alpha as "demo", say what to try, and wait until the user stops it."""
    with Client(process.base_url) as client:
        client.load_adapter("demo", show.paths.alpha)
    chat = {"model": "demo", "messages": [{"role": "user", "content": show.chat_question}]}
    load = {"lora_name": "demo", "lora_path": str(show.paths.beta), "load_inplace": True}
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


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _wants_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
