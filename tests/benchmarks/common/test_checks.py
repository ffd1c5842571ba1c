from __future__ import annotations

import pytest

from benchmarks.common.checks import Check, level, report


@pytest.mark.parametrize(
    ("after", "slack", "passed"), [(105, 0, True), (106, 0, False), (113, 8, True), (114, 8, False)]
)
def test_a_level_may_rise_by_a_twentieth_and_its_slack(
    after: int, slack: int, passed: bool
) -> None:
    assert level("it", [100, 100, 900], [0, after, 900], slack).passed is passed


def test_what_was_not_there_has_kept_no_level() -> None:
    assert not level("it", [], [1]).passed


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_a_report_ends_as_its_checks_say(
    passed: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("all is well", True, "0 of 5"), Check("it held", passed, "3, then 4")]
    with pytest.raises(SystemExit) as ended:
        report(checks, ["a story"])
    assert ended.value.code == code
    printed = capsys.readouterr().out
    assert "3, then 4" in printed
    assert "a story" in printed
