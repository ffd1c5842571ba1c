"""What two scrapes of /metrics say of the time between them. Knows no screen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one moment, by name; time in seconds on any clock."""

    time: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of this name that have these labels."""
        return sum(
            value
            for each, value in self.samples.get(name, ())
            if all(each.get(key) == wanted for key, wanted in labels.items())
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.samples.get(name, ()):
            if label in labels:
                sums[labels[label]] += value
        return dict(sums)


def read_scrape(text: str, time: float) -> Scrape:
    """Raises ValueError for what is no text of Prometheus."""
    samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name].append((sample.labels, sample.value))
    return Scrape(time, samples)


@dataclass(frozen=True, slots=True)
class Interval:
    """What changed from one scrape to the next. A server that began anew counts from nothing."""

    before: Scrape
    now: Scrape

    def rate(self, name: str, **labels: str) -> float:
        """The growth of a counter, a second."""
        return self.growth(name, **labels) / max(self.now.time - self.before.time, 1e-9)

    def growth(self, name: str, **labels: str) -> float:
        now, before = self.now.total(name, **labels), self.before.total(name, **labels)
        return now - before if now >= before else now

    def growth_by_label(self, name: str, label: str) -> dict[str, float]:
        now, before = self.now.by_label(name, label), self.before.by_label(name, label)
        return {key: max(0.0, value - before.get(key, 0.0)) for key, value in now.items()}

    def quantile(self, name: str, share: float) -> float | None:
        """About which value so large a share of a histogram's new values is at most.

        It lies somewhere in a bucket, and is told as if values were spread evenly in it.
        """
        counts = sorted(
            (float(bound), count)
            for bound, count in self.growth_by_label(f"{name}_bucket", "le").items()
        )
        if not counts or counts[-1][1] == 0:
            return None
        wanted, low, below = share * counts[-1][1], 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
            low, below = bound, count
        return low
