"""The recorded results are read in a browser and cloned with the code: they stay small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 100_000
FILES = [
    path
    for folder in ("benchmarks/results", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file()
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recorded_file_is_small(path: Path) -> None:
    assert path.stat().st_size <= MOST_BYTES


def test_facts_are_json() -> None:
    facts = [path for path in FILES if path.suffix == ".json"]
    assert len(facts) > 10
    for path in facts:
        assert json.loads(path.read_text()), path
