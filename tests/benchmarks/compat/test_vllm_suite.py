import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.facts import write_json
from benchmarks.compat.__main__ import (
    COLUMNS,
    merged,
    outcome_of,
    read_results,
    rows_of,
    section,
    table,
)
from benchmarks.compat.verdicts import OWN_CODE, VERDICTS, Verdict, verdict_of
from benchmarks.compat.vllm_suite import FILES, SuiteResult, read_report, run_pytest

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="test_good[one]"/>
<testcase classname="a" name="test_bad"><failure message="400 is not 200">trace</failure></testcase>
<testcase classname="a" name="test_broken"><error message="no server">trace</error></testcase>
<testcase classname="a" name="test_left"><skipped message="needs a GPU"/></testcase>
</testsuite></testsuites>"""
FILE = "tests/entrypoints/test_a.py"


def results_of(tmp_path: Path) -> list[SuiteResult]:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    return read_report(FILE, report)


def test_a_report_says_what_every_test_said(tmp_path: Path) -> None:
    assert [(r.name, r.outcome, r.message) for r in results_of(tmp_path)] == [
        ("test_good[one]", "passed", ""),
        ("test_bad", "failed", "400 is not 200"),
        ("test_broken", "error", "no server"),
        ("test_left", "skipped", "needs a GPU"),
    ]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    results = [*results_of(tmp_path), SuiteResult("tests/b.py", "", "error", "did not end")]
    write_json(tmp_path / "compat.json", {"results": rows_of(results)})
    assert read_results(tmp_path / "compat.json") == results


HANGS = """
import subprocess, time, pytest

@pytest.fixture
def server():
    process = subprocess.Popen(["sleep", "600"])
    with open("pid", "w") as file:
        file.write(str(process.pid))
    yield
    process.kill()
    process.wait()

def test_quick():
    pass

def test_that_hangs(server):
    time.sleep(600)
"""


@pytest.fixture
def in_background() -> Iterator[None]:
    """Interrupts are ignored, as a shell has it for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_background")
def test_what_was_tested_before_a_test_hung_is_kept_and_its_server_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_hangs.py"]
    report, pid = tmp_path / "report.xml", tmp_path / "pid"
    wait = subprocess.Popen.wait

    def wait_for_the_hang(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout != 0.0:
            return wait(process, timeout)
        while not pid.exists() and process.poll() is None:
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_the_hang)
    assert not run_pytest(command, tmp_path, {}, report, patience_seconds=0.0)
    assert [result.name for result in read_report(FILE, report)] == ["test_quick"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_verdict_is_about_the_tests_of_its_file_whose_name_begins_so() -> None:
    verdict = Verdict("entrypoints/test_a.py", "test_b", "differs", "we say 400")
    found = [
        verdict_of(SuiteResult(file, name, "failed"), [verdict])
        for file, name in ((FILE, "test_bad"), (FILE, "test_good"), ("tests/b.py", "test_bad"))
    ]
    assert found == [verdict, None, None]


def test_a_test_that_passes_needs_no_verdict_unless_it_asks_others_code() -> None:
    verdicts = [Verdict("a.py", "test_a", "differs", "why"), Verdict("b.py", "", "x", OWN_CODE)]
    passed = [SuiteResult(file, "test_a", "passed") for file in ("a.py", "b.py")]
    assert [verdict_of(result, verdicts) for result in passed] == [None, verdicts[1]]


def test_the_table_has_a_row_a_file_and_their_sum(tmp_path: Path) -> None:
    results = [*results_of(tmp_path), SuiteResult("tests/b.py", "test_c", "passed")]
    assert [outcome_of(r) for r in results] == ["passed", "failed", "error", "skipped", "passed"]
    assert table(results).splitlines()[2:] == [
        "| b.py | 1 | 0 | 0 | 0 | 0 | 0 |",
        "| entrypoints/test_a.py | 1 | 0 | 0 | 1 | 1 | 1 |",
        "| all | 2 | 0 | 0 | 1 | 1 | 1 |",
    ]


def test_below_the_table_stand_the_reasons_and_what_failed() -> None:
    bad = [SuiteResult(FILE, name, "failed", "a | b\nmore") for name in ("test_c", "test_d")]
    assert section(bad).splitlines()[-1] == "- failed (2), `test_a.py`: a / b"


def test_files_that_were_not_run_keep_their_rows() -> None:
    old = [SuiteResult("a.py", "test_a", "failed"), SuiteResult("b.py", "test_b", "passed")]
    new = [SuiteResult("a.py", "test_a", "passed")]
    assert merged(old, new) == [new[0], old[1]]


def test_each_verdict_is_about_one_file_that_is_run_and_has_a_column() -> None:
    for verdict in VERDICTS:
        assert [file.endswith(verdict.file) for file in FILES].count(True) == 1, verdict
        assert verdict.kind in COLUMNS
