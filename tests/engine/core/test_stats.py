from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import fields

from lora_serve.engine.core.stats import engine_stats
from lora_serve.engine_stats import EngineStats, StepTotals


class Busy:
    """Tells a number of whatever it is asked for, and two adapters where it is asked for those."""

    totals = StepTotals(**{field.name: 7 for field in fields(StepTotals)})
    running_adapters = waiting_adapters = (SimpleNamespace(name="a"), SimpleNamespace(name="b"))

    def __getattr__(self, name: str) -> int:
        return 7


def test_each_figure_is_told_by_the_part_that_knows_it() -> None:
    """One that is not would stand in every metric as it is before the engine's first word."""
    busy: Any = Busy()
    told, silent = engine_stats(busy, busy, busy, busy, busy), EngineStats()
    names = [field.name for field in fields(EngineStats)]
    assert [name for name in names if getattr(told, name) == getattr(silent, name)] == []
