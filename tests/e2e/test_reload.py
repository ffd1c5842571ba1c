"""The demo's scenarios: after a reload under the same name, the old KV never answers.

Counts are cut to a few; `lora-serve demo` plays the full ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.demo.client import Client
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.player import Player
from lora_serve.demo.scenarios import SCENARIOS, Ask, Scenario, Server, Step
from lora_serve.demo.server_process import ServerProcess
from lora_serve.demo.stage import Stage
from tests.e2e.conftest import ready

CACHED = [scenario for scenario in SCENARIOS if scenario.server is Server.CACHED]
SLOW = pytest.mark.slow
MOST = 3
MOST_AT_ONCE = 8


def cut(step: Step) -> Step:
    if not isinstance(step, Ask):
        return step
    return replace(step, count=min(step.count, MOST_AT_ONCE if step.concurrent else MOST))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: f"row{s.row}")
def test_each_row_answers_as_it_must(
    scenario: Scenario, stage: Stage, demo_paths: DemoPaths, tmp_path: Path
) -> None:
    process = ready(stage.start(scenario.server))
    assert problems(scenario, process, demo_paths, tmp_path) == []


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=f"row{scenario.row}", marks=() if number % 3 == 0 else SLOW)
        for number, scenario in enumerate(CACHED)
    ],
)
def test_each_cached_row_answers_as_it_must_where_steps_overlap(
    scenario: Scenario, overlapped_server: ServerProcess, demo_paths: DemoPaths, tmp_path: Path
) -> None:
    assert problems(scenario, overlapped_server, demo_paths, tmp_path) == []


def problems(
    scenario: Scenario, process: ServerProcess, demo_paths: DemoPaths, directory: Path
) -> list[str]:
    shortened = replace(scenario, steps=tuple(cut(step) for step in scenario.steps))
    with Client(process.base_url) as client:
        return Player(client, demo_paths, directory).play(shortened).problems
