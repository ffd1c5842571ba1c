from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common.facts import thinned, write_facts, write_json


def test_a_table_is_one_row_a_line(tmp_path: Path) -> None:
    rows = [{"name": f"row {i}", "milliseconds": i / 3, "note": "x" * 40} for i in range(9)]
    write_json(tmp_path / "f.json", {"machine": {"cores": 2}, "rows": rows})
    lines = (tmp_path / "f.json").read_text().splitlines()
    assert lines[1] == ' "machine": {"cores": 2},'
    assert [line.count('"name"') for line in lines[3:-2]] == [1] * 9
    assert json.loads((tmp_path / "f.json").read_text())["rows"][1]["milliseconds"] == 0.333333


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    document = {
        "empty": [],
        "nothing": None,
        "deep": [[{"figures": list(range(300))}], [1, [2.5, "é"]]],
        "words": ["a" * 200, "b" * 200],
        "large": 1_234_567.89,
        "count": 12_345_678_901,
    }
    write_json(tmp_path / "f.json", document)
    assert json.loads((tmp_path / "f.json").read_text()) == {**document, "large": 1_234_567.9}


def test_facts_name_their_machine_and_need_a_path(tmp_path: Path) -> None:
    write_facts(None, figure=1)
    write_facts(tmp_path / "f.json", figure=1)
    facts = json.loads((tmp_path / "f.json").read_text())
    assert facts["figure"] == 1
    assert facts["machine"]["num_cores"] > 0


@pytest.mark.parametrize(("count", "most"), [(3, 5), (5, 5), (682, 100), (101, 100)])
def test_thinned_rows_reach_from_the_first_to_the_last(count: int, most: int) -> None:
    rows = thinned(range(count), most)
    assert len(rows) == min(count, most)
    assert (rows[0], rows[-1]) == (0, count - 1)
    assert rows == sorted(set(rows))
