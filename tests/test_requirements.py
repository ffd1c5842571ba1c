"""What is installed, and what may run while a model is loaded."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "cpu.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = (
    *("redis", "s3", "xgrammar", "bench", "cuda", "docs", "deploy", "fleet", "otel", "test", "dev"),
)
REQUIRED = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *(PROJECT["optional-dependencies"][e] for e in EXTRAS))
    for text in group
]
LEFT_OUT = {"torch", "lora-serve"}  # chosen by TORCH=; itself


def locked() -> dict[str, list[tuple[Version, int]]]:
    """The versions in the lock file by name, and how many hashes each has."""
    found: dict[str, list[tuple[Version, int]]] = {}
    for entry in re.split(r"\n(?=[a-z])", LOCK.read_text())[1:]:
        match = re.match(r"([a-z0-9.-]+)==(\S+)", entry)
        assert match, f"not a pinned version: {entry[:60]}"
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)
        found.setdefault(match[1], []).append((Version(match[2]), len(hashes)))
    return found


def test_each_locked_version_has_hashes() -> None:
    versions = locked()
    assert len(versions) > 50
    assert [name for name, found in versions.items() if not all(n for _, n in found)] == []


@pytest.mark.parametrize("required", REQUIRED, ids=str)
def test_what_the_project_requires_is_locked_within_its_bounds(required: Requirement) -> None:
    name = canonicalize_name(required.name)
    if name in LEFT_OUT:
        return
    for version, _ in locked()[name]:
        assert version in required.specifier, "run: make lock"


def test_the_lock_file_names_no_server() -> None:
    assert re.findall(r"https?:|file:|index-url|find-links", LOCK.read_text()) == []


def calls_that_may_run_a_models_code(path: Path) -> list[str]:
    """Calls of transformers' Auto classes that do not refuse code that comes with a model."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.startswith("Auto")
        and not any(
            word.arg == "trust_remote_code"
            and isinstance(word.value, ast.Constant)
            and word.value.value is False
            for word in node.keywords
        )
    ]


def test_no_code_that_comes_with_a_model_is_run() -> None:
    sources = [*ROOT.glob("lora_serve/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    assert len(sources) > 100
    assert [call for path in sources for call in calls_that_may_run_a_models_code(path)] == []
