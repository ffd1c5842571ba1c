"""A benchmark's figures as a file for machines."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lora_serve.bench.machine import describe_machine


def write_facts(out: Path | None, **figures: object) -> None:
    """As JSON, with the machine that they were measured on; nothing if there is no path."""
    if out is not None:
        facts = {"machine": describe_machine(), **figures}
        out.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
