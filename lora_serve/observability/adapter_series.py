"""Counters labelled by adapter, with a bound on how many series there are.

The most recently active names have their own series; a name that falls out is folded into
"other", which therefore never decreases. If it comes back it starts from 0, which Prometheus
takes for a counter's reset.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_SERIES = 256
OTHER = "other"


class AdapterCounter:
    """A total for each of the `max_series` most recently active adapters, and one for the rest."""

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._totals: OrderedDict[str, int] = OrderedDict()  # least recently active first
        self._folded = 0

    def add(self, lora_name: str, amount: int) -> None:
        self._totals[lora_name] = self._totals.pop(lora_name, 0) + amount
        if len(self._totals) > self._max_series:
            _, total = self._totals.popitem(last=False)
            self._folded += total

    def totals(self) -> dict[str, int]:
        """The total of each adapter, and of "other" once something was folded into it."""
        totals = dict(self._totals)
        if self._folded:
            totals[OTHER] = totals.get(OTHER, 0) + self._folded
        return totals
