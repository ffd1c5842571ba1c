"""The player must pass an honest server, and catch every dishonest one in the rows meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.demo.client import Client
from lora_serve.demo.corpus import ALPHA_LABEL, BASE_LABEL, BETA_LABEL
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.player import Player
from lora_serve.demo.scenarios import MODEL_NAME, SCENARIOS, Server
from tests.fakes.label_server import (
    Key,
    LabelServer,
    by_content,
    by_name,
    by_name_and_path,
    by_nothing,
    serving,
)

UNCACHED = {Server.UNCACHED, Server.PLAIN_UNCACHED}
CACHED_ROWS = {s.row for s in SCENARIOS if s.server not in UNCACHED}
UNCACHED_ROWS = {s.row for s in SCENARIOS if s.server in UNCACHED}


@pytest.fixture
def paths(tmp_path: Path) -> DemoPaths:
    paths = DemoPaths(tmp_path / "model", tmp_path / "alpha", tmp_path / "beta")
    for path, label in ((paths.alpha, ALPHA_LABEL), (paths.beta, BETA_LABEL)):
        path.mkdir()
        (path / "label").write_text(label)
    return paths


def failed_rows(paths: DemoPaths, key: Key | None) -> set[int]:
    """All rows, played in order on one server."""
    server = LabelServer(MODEL_NAME, BASE_LABEL, key)
    with serving(server) as base_url, Client(base_url) as client:
        player = Player(client, paths, paths.model.parent)
        outcomes = [player.play(scenario) for scenario in SCENARIOS]
    return {outcome.scenario.row for outcome in outcomes if not outcome.passed}


def test_a_key_of_content_passes_every_cached_row(paths: DemoPaths) -> None:
    assert failed_rows(paths, by_content) == UNCACHED_ROWS


def test_without_a_cache_right_answers_prove_nothing(paths: DemoPaths) -> None:
    assert failed_rows(paths, None) == CACHED_ROWS


def test_a_key_of_names_fails_wherever_bytes_change(paths: DemoPaths) -> None:
    assert failed_rows(paths, by_name) >= {5, 7, 10, 11, 13, 14, 15, 16}


def test_a_key_of_name_and_path_fails_where_new_bytes_lie_at_the_same_path(
    paths: DemoPaths,
) -> None:
    assert failed_rows(paths, by_name_and_path) - UNCACHED_ROWS == {14, 15, 17}


def test_a_key_without_the_adapter_fails_everywhere(paths: DemoPaths) -> None:
    assert failed_rows(paths, by_nothing) >= CACHED_ROWS - {4}


def test_a_refused_load_is_the_outcome_and_not_a_crash(paths: DemoPaths) -> None:
    (paths.alpha / "label").unlink()
    server = LabelServer(MODEL_NAME, BASE_LABEL, by_content)
    with serving(server) as base_url, Client(base_url) as client:
        outcome = Player(client, paths, paths.model.parent).play(SCENARIOS[0])
    assert not outcome.passed
    assert outcome.num_asked == 0
    assert "POST /v1/load_lora_adapter: 404" in outcome.problems[0]


def test_the_table_is_that_of_the_report() -> None:
    last_questions = {s.row: s.steps[-1] for s in SCENARIOS}
    counts = {row: getattr(step, "count", 0) for row, step in last_questions.items()}
    assert [counts[row] for row in range(1, 14)] == [
        10,
        10,
        10,
        12,
        10,
        10,
        10,
        10,
        10,
        10,
        4,
        4,
        32,
    ]
