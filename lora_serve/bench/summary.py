"""Sums up a run's records: percentiles, rates and errors, over all requests and by adapter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lora_serve.bench.client import RequestRecord
from lora_serve.bench.load import LoadResult

BASE = "base"  # how tables and JSON name the requests without an adapter


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over requests (or over tokens), in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Spread | None:
        """The spread of these values; None if there are none."""
        if not values:
            return None
        ordered = sorted(1e3 * value for value in values)
        return cls(
            sum(ordered) / len(ordered),
            *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One group of requests. Rates are over `wall_seconds`, the whole run's time.

    tokens_per_event: above 1 where a server bundles tokens; `itl` is then a gap between bundles.
    """

    num_requests: int
    num_failed: int
    wall_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_event: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    late: Spread | None

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def requests_per_second(self) -> float:
        return (self.num_requests - self.num_failed) / self.wall_seconds

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.wall_seconds

    @property
    def total_tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.wall_seconds


@dataclass(frozen=True, slots=True)
class RunSummary:
    """All requests together and in groups.

    errors: how often each message came.
    client_cpu_share: cores that the client itself kept busy, on average; a large share slows a
        server on the same machine.
    """

    total: Summary
    by_adapter: Mapping[str, Summary]
    errors: Mapping[str, int]
    client_cpu_share: float


def summarize(result: LoadResult) -> RunSummary:
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in result.records:
        groups[record.adapter or BASE].append(record)
    wall = result.wall_seconds
    return RunSummary(
        total=_summary(result.records, wall),
        by_adapter={name: _summary(groups[name], wall) for name in sorted(groups)},
        errors=Counter(record.error for record in result.records if record.error),
        client_cpu_share=result.client_cpu_seconds / wall,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the ordered values, as numpy does."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _summary(records: Iterable[RequestRecord], wall_seconds: float) -> Summary:
    records = tuple(records)
    done = [record for record in records if record.error is None]
    gaps = [gap for record in done for gap in record.gaps_seconds]
    output_tokens = sum(record.output_tokens for record in done)
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(done),
        wall_seconds=wall_seconds,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output_tokens,
        tokens_per_event=output_tokens / max(1, len(gaps) + len(done)),
        ttft=Spread.of_seconds([record.ttft_seconds for record in done]),
        tpot=Spread.of_seconds([r.tpot_seconds for r in done if r.tpot_seconds is not None]),
        itl=Spread.of_seconds(gaps),
        e2e=Spread.of_seconds([record.e2e_seconds for record in done]),
        late=Spread.of_seconds([record.late_seconds for record in records]),
    )
