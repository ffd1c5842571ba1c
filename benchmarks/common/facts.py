"""A benchmark's figures as a file for machines, small enough to be read and compared by people.

What fits a line stands on one: a table is one row a line. Figures have six digits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from lora_serve.bench.machine import describe_machine

LINE = 240  # characters; more are broken where a list or an object begins
DIGITS = 6

Row = TypeVar("Row")


def write_facts(out: Path | None, **figures: object) -> None:
    """Write them as JSON with the machine they were measured on; nothing if there is no path."""
    if out is not None:
        write_json(out, {"machine": describe_machine(), **figures})


def write_json(path: Path, document: object) -> None:
    """Write anything that msgspec can encode."""
    plain = msgspec.json.decode(msgspec.json.encode(document))
    path.write_text(_text(plain, "") + "\n", encoding="utf-8")


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """Thin the rows to `most`, evenly spread from the first to the last."""
    if len(rows) <= most:
        return list(rows)
    step = (len(rows) - 1) / (most - 1)
    return [rows[round(i * step)] for i in range(most)]


def _text(value: object, indent: str) -> str:
    line = json.dumps(_rounded(value), ensure_ascii=False)
    if len(indent) + len(line) <= LINE or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_text(entry, inner)}" for key, entry in value.items()]
        opening, closing = "{}"
    elif all(isinstance(entry, dict | list) for entry in value):
        parts = [_text(entry, inner) for entry in value]
        opening, closing = "[]"
    else:
        return line  # of figures or words alone
    lines = ",\n".join(inner + part for part in parts)
    return f"{opening}\n{lines}\n{indent}{closing}"


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else round(value, 1)
    return value
