from __future__ import annotations

from pathlib import Path

from benchmarks.soak.samples import Totals, bytes_below


def test_counters_of_engines_that_follow_each_other_are_added_up() -> None:
    totals = Totals()
    for value in (3.0, 5.0, 1.0, 1.0, 4.0):  # a new engine began at 0 after the 5
        totals.add({"steps_total": value, "gauge": value})
    assert totals.values == {"steps_total": 9.0}


def test_files_that_vanish_while_they_are_counted_take_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"12345")
    (kept / "gone").symlink_to(tmp_path / "nowhere")  # listed, and not there when it is looked at
    assert bytes_below(tmp_path) == 5
    assert bytes_below(tmp_path / "dropped") == 0
