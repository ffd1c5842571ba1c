from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.errors import ConfigError
from lora_serve.fleet import ray_home
from lora_serve.fleet.ray_home import RayHome


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where homes are made, though its path may be too long for sockets."""
    monkeypatch.setattr(ray_home, "_MOST_CHARS", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def with_logs(home: RayHome) -> None:
    logs = home.path / "session_2026-01-01_00-00-00_1_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("told")


def fail(error: BaseException, *, explains_nothing: bool = False) -> None:
    with RayHome() as home:
        with_logs(home)
        home.explains_nothing = explains_nothing
        raise error


def test_nothing_stays_of_a_fleet_that_ended_well(parent: Path) -> None:
    with RayHome() as home:
        with_logs(home)
        assert home.path.parent == parent
    assert [*parent.iterdir()] == []


@pytest.mark.parametrize("error", [ConfigError("--replicas: why"), KeyboardInterrupt()], ids=str)
def test_nothing_stays_of_a_start_that_was_refused_or_given_up(
    error: BaseException, parent: Path
) -> None:
    with pytest.raises(type(error)):
        fail(error)
    assert [*parent.iterdir()] == []


@pytest.mark.parametrize("is_of_ray", [True, False])
def test_the_logs_stay_where_something_failed_that_says_too_little(
    is_of_ray: bool, parent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("lost") if is_of_ray else ConfigError("cannot be started")
    with pytest.raises(type(error)):
        fail(error, explains_nothing=not is_of_ray)
    (kept,) = parent.iterdir()
    assert (kept / "logs" / "raylet.out").read_text() == "told"
    assert f"Ray's logs are kept in {kept / 'logs'}" in caplog.text
    with RayHome():
        pass
    assert [*parent.iterdir()] == [kept], "no later start removes them"


def test_where_paths_of_sockets_would_be_too_long_it_is_in_tmp(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_home, "_MOST_CHARS", 40)
    monkeypatch.setenv("RAY_TMPDIR", str(parent / ("long" * 10)))
    with RayHome() as home:
        assert home.path.parent == Path("/tmp")
        assert len(str(home.path)) <= 40


def test_a_home_whose_owner_was_killed_goes_at_the_next_start(parent: Path) -> None:
    killed = RayHome()
    killed._directory._lock.close()
    with RayHome() as home:
        assert [*parent.iterdir()] == [home.path]
