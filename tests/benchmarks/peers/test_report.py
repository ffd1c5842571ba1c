from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.limits import MachineLimits
from benchmarks.common.page import folded, marks
from benchmarks.peers.measurements import Figure, figure_of
from benchmarks.peers.report import (
    MARKS,
    ROWS,
    EngineResult,
    PeerRun,
    PhaseFacts,
    markdown,
    write_report,
)
from tests.bench.records import MACHINE

LIMITS = MachineLimits(gflops=450.0, gb_per_second=50.0, library_gflops=400.0)


def figure(value: float) -> Figure:
    return figure_of([value])


OURS = EngineResult(
    name="lora-serve",
    notes="exact",
    figures={
        "prefill": figure(500),
        "decode-1": figure(25),
        "prefill-base": figure(500),
        "prefill-adapter": figure(450),
    },
    limits={"prefill": (LIMITS,), "decode-1": (LIMITS,)},
)
PEER = EngineResult(
    name="other",
    notes="1.0",
    figures={"prefill": figure(250), "decode-1": figure(75)},
    reasons={"prefill-adapter": "knows no adapters", "decode-adapter": "knows no adapters"},
)
FACTS = PhaseFacts(date="2026-01-02", commit="abc", load_average=0.5, busy_cores=0.0)
RUN = PeerRun(machine=MACHINE, engines=(OURS, PEER), phases={"base": FACTS})


def test_a_ratio_says_how_many_times_as_fast_ours_is_whichever_way_is_better() -> None:
    text = markdown(RUN)
    assert "1,024 tokens, 1 request, tokens/s | 500 | 250 (2.00×) | 629 (80%) |" in text
    assert "| `decode-1`: decode step, 1 request, ms | 25.0 | 75.0 (3.00×) | 19.8 (79%) |" in text


def test_what_was_not_run_says_so_and_why_once() -> None:
    text = markdown(RUN)
    assert "one adapter, tokens/s | 450 | not run |" in text
    assert text.count("knows no adapters") == 1
    assert "- other, `prefill-adapter`, `decode-adapter`: knows no adapters." in text


def test_what_an_adapter_costs_is_told_within_each_engine() -> None:
    assert "of the base's speed | 90% | not run |" in markdown(RUN)


def test_what_an_adapter_costs_is_told_by_runs_that_followed_each_other() -> None:
    """The machine became half as fast between the first pair of runs and the second."""
    ours = replace(
        OURS,
        figures={
            "decode-base": figure_of([10.0, 20.0, 20.0]),
            "decode-adapter": figure_of([12.5, 12.5, 25.0]),
        },
    )
    assert "of the base's speed | 80% |" in markdown(replace(RUN, engines=(ours,)))


def test_without_ours_there_are_no_ratios() -> None:
    text = markdown(replace(RUN, engines=(PEER,)))
    assert ": prefill of 1,024 tokens, 1 request, tokens/s | 250 |" in text
    assert "250 (" not in text


def test_the_page_says_on_which_machine_and_what_its_limits_are() -> None:
    text = markdown(RUN)
    assert "Some CPU, 2 cores, 8 GiB" in text
    assert "; 2026-01-02, commit abc. What the machine" in text
    assert "50 GB/s read from memory, 450 GFLOP/s of bf16 products (torch's own: 400)" in text


def test_limits_that_changed_in_the_run_are_told_as_a_range() -> None:
    slower = replace(PEER, limits={"decode-1": (replace(LIMITS, gb_per_second=28.0),)})
    text = markdown(replace(RUN, engines=(OURS, slower)))
    assert "28 to 50 GB/s read from memory, 450 GFLOP/s" in text


def test_each_run_is_held_against_what_the_machine_was_capable_of_around_it() -> None:
    """The memory was twice as fast in the second run, and so were we: 79 % of it each time."""
    fast = replace(LIMITS, gb_per_second=100.0)
    ours = replace(
        OURS,
        figures={"decode-1": figure_of([25.0, 12.5, 25.0])},
        limits={"decode-1": (LIMITS, fast, LIMITS)},
    )
    text = markdown(replace(RUN, engines=(ours, PEER)))
    assert "| 25.0 | 75.0 (3.00×) | 19.8 (79%) |" in text


def test_a_disturbed_run_is_marked() -> None:
    assert "Disturbed" not in markdown(RUN)
    disturbed = replace(RUN, phases={"base": FACTS, "zipf": replace(FACTS, busy_cores=1.3)})
    assert "up to 1.3 cores were in use" in markdown(disturbed)


def limit_of(key: str) -> float | None:
    limit = ROWS[key].limit
    return limit(LIMITS) if limit else None


def test_limits_follow_from_bandwidth_and_products() -> None:
    assert limit_of("prefill") == pytest.approx(450e9 / (2 * 357.8e6), rel=0.01)
    assert limit_of("prefill-adapter") == pytest.approx(450e9 / (2 * 366.6e6), rel=0.01)
    assert limit_of("decode-1") == pytest.approx(1e3 * 988e6 / 50e9, rel=0.01)
    assert limit_of("decode-8-of-8") == pytest.approx(1e3 * 1129e6 / 50e9, rel=0.01)
    assert limit_of("int8-decode-1") == pytest.approx(1e3 * 502e6 / 50e9, rel=0.01)
    assert limit_of("int8-activations-prefill") is None
    assert limit_of("zipf-4") is None
    loop = limit_of("closed-loop")
    assert loop is not None
    assert 150 < loop < 190


def test_a_run_is_written_for_people_and_for_machines(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("\n".join((*marks(MARKS), "")))
    write_report(RUN, tmp_path / "results" / "peers", page)
    assert "2.00×" in page.read_text()
    assert "2.00×" in (tmp_path / "results" / "peers.md").read_text()
    document = json.loads((tmp_path / "results" / "peers.json").read_text())
    assert document["format"] == "lora-serve/peers/3"
    assert document["run"]["engines"][0]["figures"]["prefill"]["value"] == 500
    assert document["rows"]["prefill"]["unit"] == "tok/s"
    assert (tmp_path / "results" / "peers.svg").stat().st_size


def test_phases_of_several_commits_say_which() -> None:
    phases = {"base": FACTS, "adapters": FACTS, "int8": replace(FACTS, commit="def")}
    text = markdown(replace(RUN, phases=phases))
    assert "2026-01-02, commit abc (base, adapters); 2026-01-02, commit def (int8)." in text


def test_a_page_has_no_long_lines_but_in_tables() -> None:
    row = "| " + "x" * 150 + " |"
    entry = "- vllm: " + "a word " * 40
    lines = folded(f"{row}\n\n{entry}\n").splitlines()
    assert lines[:2] == [row, ""]
    assert max(map(len, lines[2:])) <= 100
    assert [line[:2] for line in lines[2:]] == ["- ", "  ", "  "]
    assert " ".join(" ".join(lines[2:]).split()) == " ".join(entry.split())
