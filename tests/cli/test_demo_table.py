from __future__ import annotations

from io import StringIO

from lora_serve.cli.demo_table import DemoTable
from lora_serve.demo.player import Outcome
from lora_serve.demo.scenarios import SCENARIOS


def outcome(row: int, *problems: str) -> Outcome:
    return Outcome(
        SCENARIOS[row - 1],
        answer="BETA_ADAPTER_VERSION_B",
        num_right=9,
        num_asked=10,
        num_cached_tokens=35_100,
        num_prompt_tokens=39_000,
        seconds=1.25,
        problems=list(problems),
    )


def written(outcomes: list[Outcome], *, colours: bool = False) -> str:
    out = StringIO()
    table = DemoTable(out, colours=colours)
    table.start([o.scenario.title for o in outcomes])
    for o in outcomes:
        table.begin(o.scenario)
        table.end(o)
    table.summary(outcomes)
    return out.getvalue()


def test_a_row_shows_answer_hits_time_and_verdict() -> None:
    row = written([outcome(5)]).splitlines()[1]
    assert "A → B in place, same name" in row
    assert "BETA_ADAPTER_VERSION_B 9/10" in row
    assert "35,100/39,000  90%" in row
    assert "1.2 s" in row
    assert row.endswith("ok")


def test_a_failure_is_explained_and_named_again_at_the_end() -> None:
    text = written([outcome(5), outcome(14, "1 of 10 answered 'ALPHA' instead of 'BETA'")])
    assert "FAILED\n      1 of 10 answered 'ALPHA' instead of 'BETA'\n" in text
    assert "1 of 2 rows passed" in text
    assert text.endswith("row 14 failed: new bytes at the same path, load in place\n")


def test_colours_come_only_when_asked_for() -> None:
    outcomes = [outcome(5), outcome(14, "wrong")]
    assert "\x1b[" not in written(outcomes)
    assert "\x1b[32mok\x1b[0m" in written(outcomes, colours=True)
    assert "\x1b[31mFAILED\x1b[0m" in written(outcomes, colours=True)
