from __future__ import annotations

import json
from pathlib import Path

from lora_serve.fleet.replicas import Standing
from lora_serve.fleet.reports import MAX_UNABLE, Reporter, Versions, report_of
from tests.fakes.engine import FakeEngine, write_adapter


async def test_a_report_tells_of_adapters_and_load_and_is_plain_json(tmp_path: Path) -> None:
    engine = FakeEngine()
    await engine.load_lora_adapter("a", write_adapter(tmp_path / "a", "weights"))
    engine.growing |= {"one", "two"}
    stats = json.loads(json.dumps(await Reporter(engine).stats()))
    report = report_of(stats)
    assert (report.num_running, report.is_draining) == (2, False)
    assert report.standing("a") is Standing.IN_MEMORY
    assert report.standing("b") is Standing.KNOWN
    assert report_of({}).standing("a") is Standing.KNOWN  # it has not reported yet


async def test_a_report_tells_which_names_the_replica_refuses_up_to_a_bound() -> None:
    unable = ["lost"]
    reporter = Reporter(FakeEngine(), lambda: unable)
    assert report_of(await reporter.stats()).standing("lost") is Standing.UNABLE
    unable[:] = [f"lost{i}" for i in range(MAX_UNABLE + 1)]
    report = report_of(await reporter.stats())
    assert report.standing("lost") is Standing.KNOWN
    assert report.standing("lost0") is Standing.UNABLE
    assert len(report.unable) == MAX_UNABLE


async def test_a_replica_without_an_engine_takes_no_requests() -> None:
    engine = FakeEngine()
    engine.is_alive = False
    assert report_of(await Reporter(engine).stats()).is_draining


async def test_many_adapters_are_listed_for_a_small_share_of_the_time(tmp_path: Path) -> None:
    engine = FakeEngine()
    times = iter([0.0, 0.5, 49.0, 51.0, 51.1])  # a listing that takes half a second
    reporter = Reporter(engine, clock=lambda: next(times))
    await reporter.stats()
    await engine.load_lora_adapter("a", write_adapter(tmp_path / "a", "weights"))
    assert (await reporter.stats())["versions"] == {}
    assert {*(await reporter.stats())["versions"]} == {"a"}


def test_a_name_is_replaced_when_its_version_changes_and_not_when_it_is_new() -> None:
    versions = Versions(max_names=2)
    assert versions.replaced({"versions": {"a": "1", "b": "1"}}) == []
    assert versions.replaced({"versions": {"a": "2", "b": "1"}}) == ["a"]
    assert versions.replaced({"versions": {"c": "1"}}) == []
    assert versions.replaced({"versions": {"a": "3"}}) == []  # forgotten for c
    assert versions.replaced({}) == []
