"""Docstrings are sentences with a subject and a verb, not ends of a sentence that a reader adds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("lora_serve", "benchmarks", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_SUBJECT = (
    *("As ", "By ", "For ", "From ", "In ", "Of ", "That ", "Those ", "To ", "Whoever ", "With "),
)


def docstrings() -> Iterator[tuple[str, str]]:
    """Where each docstring of the project stands, and its first line."""
    for path in sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text is not None:
                name = getattr(node, "name", "module")
                yield f"{path.relative_to(ROOT)}: {name}", text.partition("\n")[0]


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    found = dict(docstrings())
    assert len(found) > 1000, "the trees have moved"
    assert [place for place, line in found.items() if line.startswith(NO_SUBJECT)] == []
