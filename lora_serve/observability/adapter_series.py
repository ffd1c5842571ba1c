"""What metrics tell of each adapter, with a bound on how many series there are.

In counters, the most recently active names have their own series; one that falls out is folded
into "other", which therefore never decreases. If it comes back it starts from 0, which Prometheus
takes for a counter's reset.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from prometheus_client.core import GaugeMetricFamily

from lora_serve.engine_stats import EngineStats
from lora_serve.messages import AdapterInfo

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


def lora_requests_info(
    max_lora: int, stats: EngineStats, adapters: Sequence[AdapterInfo]
) -> GaugeMetricFamily:
    """Which adapters could run in the next step, and which wait; the newest time counts.

    Gateways send a request where its adapter is named, and else where fewer than `max_lora`
    are. So all adapters on the device are named, those in the running batch first.
    """
    on_device = [adapter.name for adapter in adapters if adapter.is_resident]
    labels = {
        "max_lora": str(max_lora),
        "running_lora_adapters": _name_list((*stats.running_adapters, *on_device)),
        "waiting_lora_adapters": _name_list(stats.waiting_adapters),
    }
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters on the device and adapters that wait, with the time.",
        labels=tuple(labels),
    )
    family.add_metric(tuple(labels.values()), time.time())
    return family


def adapter_gauges(
    labels: Mapping[str, str], adapters: Sequence[AdapterInfo]
) -> Iterator[GaugeMetricFamily]:
    """One series for each registered adapter, resident ones first, gone with the adapter.

    Those beyond MAX_SERIES are added up as "other".
    """
    resident = GaugeMetricFamily(
        "lora_serve:adapter_resident",
        "1 if the adapter's weights are in memory, 0 if they were evicted.",
        labels=(*labels, "lora_name", "digest", "generation", "rank", "pinned"),
    )
    size = GaugeMetricFamily(
        "lora_serve:adapter_size_bytes",
        "Bytes of the adapter's weights.",
        labels=(*labels, "lora_name"),
    )
    own = tuple(labels.values())
    in_order = sorted(adapters, key=lambda adapter: not adapter.is_resident)
    for adapter in in_order[:MAX_SERIES]:
        version = (adapter.digest, str(adapter.generation), str(adapter.rank))
        resident.add_metric(
            (*own, adapter.name, *version, str(adapter.pinned).lower()),
            adapter.is_resident,
        )
        size.add_metric((*own, adapter.name), adapter.num_bytes)
    if rest := in_order[MAX_SERIES:]:
        num_resident = sum(adapter.is_resident for adapter in rest)
        resident.add_metric((*own, OTHER, "", "", "", ""), num_resident)
        size.add_metric((*own, OTHER), sum(adapter.num_bytes for adapter in rest))
    yield resident
    yield size


def _name_list(names: Iterable[str]) -> str:
    """At most MAX_SERIES names with commas between; one that has a comma would be read as two."""
    told = dict.fromkeys(name for name in names if "," not in name)
    return ",".join(islice(told, MAX_SERIES))
