from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from lora_serve.bench.goodput import Limits
from lora_serve.bench.report import save_json, text_report
from lora_serve.bench.workload import WorkloadSpec
from tests.bench.records import record, run_of


def test_the_report_says_what_was_measured_where_and_how_fast() -> None:
    report = text_report(run_of(record(), record()))
    assert "bench serve: 2 requests, Poisson, 2 requests/s, at most 4 at a time" in report
    assert "Some CPU, 2 cores, 8 GiB, load average 0.5 before the run" in report
    assert "time to first token    100.0  100.0  100.0  100.0" in report
    assert "prompt tokens  20 (50% cached)" in report
    assert "output tokens  10: 5.0/s" in report
    assert "client         5.0% of a core" in report
    assert "adapter" not in report


def test_goodput_is_told_where_limits_are_given() -> None:
    run = run_of(record(), record(ttft=0.6))
    report = text_report(replace(run, limits=Limits(ttft=500)))
    assert "goodput        0.50/s: 50.0% of the requests were within ttft 500 ms" in report
    assert "goodput" not in text_report(run)


def test_lateness_is_shown_where_requests_have_times() -> None:
    timed = run_of(record())
    assert "sent late by" in text_report(timed)
    assert "sent late by" not in text_report(replace(timed, workload=WorkloadSpec()))


def test_the_report_shows_errors_and_how_often_each_came() -> None:
    report = text_report(run_of(record(), record(error="HTTP 500: no"), record(error="HTTP 404")))
    assert "requests       3 (2 failed)" in report
    assert "error, 1 times: HTTP 500: no" in report


def test_a_run_in_which_all_fails_still_has_a_report() -> None:
    report = text_report(run_of(record(error="refused")))
    assert "1 (1 failed)" in report
    assert "time to first token" not in report


def test_adapters_have_a_row_each_most_requests_first() -> None:
    report = text_report(run_of(record("x"), record("y"), record("y"), record("z", error="no")))
    lines = [line.split() for line in report.splitlines()]
    assert ["y", "2", "0", "5.0", "100.0", "100.0", "20.0", "20.0", "180.0"] in lines
    assert ["z", "1", "1", "0.0", "–", "–", "–", "–", "–"] in lines
    assert report.index("\ny ") < report.index("\nx ")


def test_a_thousand_adapters_do_not_fill_the_screen() -> None:
    report = text_report(run_of(*(record(f"a{i}") for i in range(1000))))
    assert "… and 980 more adapters; --json has all" in report
    assert len(report.splitlines()) < 45


def test_bundled_tokens_are_pointed_out() -> None:
    bundled = record()
    object.__setattr__(bundled, "output_tokens", 10)
    assert "bundles 2.00 tokens an event" in text_report(run_of(bundled))
    assert "bundles" not in text_report(run_of(record()))


def test_the_json_has_the_machine_the_workload_and_every_request(tmp_path: Path) -> None:
    save_json(run_of(record("x"), record(error="no")), tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["format"] == "lora-serve/bench/1"
    assert document["machine"]["cpu"] == "Some CPU"
    assert document["workload"]["request_rate"] == 2.0
    assert document["summary"]["errors"] == {"no": 1}
    assert [request["adapter"] for request in document["requests"]] == ["x", None]
    assert document["requests"][0]["gaps_seconds"] == [0.02] * 4
