from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.environment import Environment, InstallError, ensure_environment


class Recipe:
    """Counts how often it was followed; may fail."""

    def __init__(self, command: str = "print('building')") -> None:
        self.command = command
        self.times = 0

    def install(self, environment: Environment) -> None:
        self.times += 1
        environment.run([sys.executable, "-c", self.command], variables={"ANSWER": "42"})


def ensure(root: Path, name: str, recipe: Recipe) -> None:
    ensure_environment(root, name, recipe.install, create=Path.mkdir)


def test_a_finished_environment_is_kept_and_another_recipe_builds_anew(tmp_path: Path) -> None:
    recipe = Recipe()
    for name in ("a 1", "a 1", "a 2"):
        ensure(tmp_path / "a", name, recipe)
    assert recipe.times == 2


def test_a_build_that_failed_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(InstallError):
        ensure(tmp_path / "a", "a 1", Recipe("raise SystemExit(1)"))
    recipe = Recipe()
    ensure(tmp_path / "a", "a 1", recipe)
    assert recipe.times == 1


def test_a_failure_is_told_with_the_commands_last_words(tmp_path: Path) -> None:
    recipe = Recipe("raise SystemExit('no compiler here')")
    with pytest.raises(InstallError, match="no compiler here"):
        ensure(tmp_path / "a", "a 1", recipe)


def test_all_that_was_run_and_said_is_in_the_log(tmp_path: Path) -> None:
    ensure(tmp_path / "a", "a 1", Recipe("import os; print('the answer is', os.environ['ANSWER'])"))
    log = (tmp_path / "a" / "install.log").read_text()
    assert log.startswith("$ ")
    assert "the answer is 42" in log
