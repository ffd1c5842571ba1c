from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.bench.plots import can_plot, check_plot_path, plot_bars, plot_latencies, plot_lines
from lora_serve.errors import ConfigError
from tests.bench.records import record, run_of

needs_matplotlib = pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")


@needs_matplotlib
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_latencies_are_drawn_in_the_format_that_the_name_asks_for(
    tmp_path: Path, suffix: str, magic: bytes
) -> None:
    result = run_of(record("x"), record("y", ttft=0.2), record(error="no")).result
    path = tmp_path / f"plot{suffix}"
    plot_latencies({"run": result}, path)
    assert path.read_bytes().startswith(magic)


@needs_matplotlib
def test_a_run_in_which_all_failed_can_be_drawn(tmp_path: Path) -> None:
    plot_latencies({"run": run_of(record(error="no")).result}, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size


@needs_matplotlib
def test_bars_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    plot_bars({"decode": {"a": 1.0, "b": 2.0}, "prefill": {"b": 3.0}}, "ratio", tmp_path / "b.svg")
    assert (tmp_path / "b.svg").stat().st_size


@needs_matplotlib
def test_lines_are_drawn_in_a_panel_for_each_quantity(tmp_path: Path) -> None:
    path = tmp_path / "l.svg"
    lines = {"affinity": {10.0: 1.0, 1000.0: 2.0}, "round-robin": {10.0: 3.0}}
    plot_lines({"loads": lines, "cached": lines}, "adapters", path)
    text = path.read_text()
    assert all(word in text for word in ("affinity", "round-robin", "loads", "cached"))
    assert path.stat().st_size < 100_000


def test_a_format_that_cannot_be_drawn_is_refused_before_the_run() -> None:
    check_plot_path(Path("x.svg"))
    with pytest.raises(ConfigError, match=r"\.png"):
        check_plot_path(Path("x.bmp"))
