"""The lines that `lora-serve top` shows, for a width and a height. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_serve.cli.remote import ServedModel
from lora_serve.cli.top_samples import Interval
from lora_serve.observability.escapes import escaped
from lora_serve.observability.sizes import shown_bytes
from lora_serve.observability.table import text_table

BAR_WIDTH = 20
TITLE_WIDTH = 12
FEWEST_COLUMNS = 40
MOST_ROWS = 8  # of adapters, and of requests


@dataclass(frozen=True, slots=True)
class View:
    """What is known of a server. requests: as /v1/requests lists them; None where it does not."""

    url: str
    interval: Interval
    models: Sequence[ServedModel] = ()
    requests: Sequence[dict[str, Any]] | None = None
    trouble: str = ""
    clock: float = field(default_factory=time.time)


def screen(view: View, columns: int, rows: int | None = None) -> list[str]:
    """The lines, none longer than `columns`, and not more than `rows`."""
    lines = [*_head(view), *_summary(view.interval), *_adapters(view), *_requests(view)]
    cut = [escaped(line)[: max(columns, FEWEST_COLUMNS)] for line in lines]
    return cut if rows is None else cut[:rows]


def _head(view: View) -> Iterator[str]:
    base = ", ".join(model.name for model in view.models if not model.is_adapter)
    when = time.strftime("%H:%M:%S", time.localtime(view.clock))
    yield f"{view.url}  {base}  {when}"
    if view.trouble:
        yield f"! {view.trouble}"
    yield ""


def _summary(seen: Interval) -> Iterator[str]:
    now = seen.now
    yield _line(
        "tokens/s",
        f"{seen.rate('vllm:generation_tokens_total'):,.0f} generated, "
        f"{seen.rate('lora_serve:computed_tokens_total'):,.0f} computed",
    )
    yield _line(
        "requests",
        f"{now.total('vllm:num_requests_running'):.0f} running, "
        f"{now.total('vllm:num_requests_waiting'):.0f} waiting{_reasons(seen)}, "
        f"{seen.rate('vllm:request_success_total'):.1f}/s finished",
    )
    yield _line("first token", _quantiles(seen, "vllm:time_to_first_token_seconds"))
    yield _line("each token", _quantiles(seen, "vllm:inter_token_latency_seconds"))
    yield _line("queue", _quantiles(seen, "vllm:request_queue_time_seconds"))
    usage = now.total("vllm:kv_cache_usage_perc")
    yield _line("KV cache", f"{_bar(usage)} {usage:4.0%} in use{_hits(seen)}")
    for tier in now.by_label("lora_serve:kv_tier_bytes", "tier"):
        yield _line(f"KV {tier}", _tier(seen, tier))
    if now.total("lora_serve:is_paused"):
        yield _line("paused", "no step is made until /resume")


def _reasons(seen: Interval) -> str:
    reasons = seen.now.by_label("vllm:num_requests_waiting_by_reason", "reason")
    told = [f"{count:.0f} {reason}" for reason, count in reasons.items() if count]
    return f" ({', '.join(told)})" if told else ""


def _quantiles(seen: Interval, name: str) -> str:
    shares = {share: seen.quantile(name, share) for share in (0.5, 0.95)}
    told = [
        f"p{share * 100:.0f} {_ms(value)}" for share, value in shares.items() if value is not None
    ]
    return ", ".join(told) or "–"


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1000:,.0f} ms"


def _hits(seen: Interval) -> str:
    queries = seen.growth("vllm:prefix_cache_queries_total")
    if not queries:
        return ""
    return f", {seen.growth('vllm:prefix_cache_hits_total') / queries:.0%} of prompt tokens found"


def _tier(seen: Interval, tier: str) -> str:
    now = seen.now
    used = now.total("lora_serve:kv_tier_bytes", tier=tier)
    capacity = now.total("lora_serve:kv_tier_capacity_bytes", tier=tier)
    amount = f"{shown_bytes(int(used))} of {shown_bytes(int(capacity))}"
    told = [
        amount if capacity else shown_bytes(int(used)),
        f"{seen.rate('lora_serve:kv_tier_hit_blocks_total', tier=tier):.1f} blocks/s given",
        f"{seen.rate('lora_serve:kv_tier_saved_blocks_total', tier=tier):.1f} stored",
    ]
    for kind, what in (("load", "read"), ("save", "stored")):
        if now.total(f"lora_serve:kv_tier_{kind}_breaker_open", tier=tier):
            told.append(f"left alone after failures: nothing is {what}")
    return ", ".join(told)


def _adapters(view: View) -> Iterator[str]:
    adapters = [model for model in view.models if model.is_adapter]
    if not adapters:
        return
    finished = view.interval.growth_by_label("lora_serve:adapter_requests_total", "lora_name")
    totals = view.interval.now.by_label("lora_serve:adapter_requests_total", "lora_name")
    busiest = sorted(
        adapters, key=lambda one: (-finished.get(one.name, 0), -totals.get(one.name, 0), one.name)
    )
    num_resident = sum(one.facts.get("residency") == "resident" for one in adapters)
    yield ""
    table = [
        (
            one.name,
            f"{finished.get(one.name, 0):.0f}",
            f"{totals.get(one.name, 0):,.0f}",
            str(one.facts.get("num_leases", "–")),
            str(one.facts.get("digest", "–"))[:12],
            str(one.facts.get("residency", "–")),
        )
        for one in busiest[:MOST_ROWS]
    ]
    title = f"adapters: {len(adapters)}, {num_resident} resident"
    header = (title, "now", "finished", "leases", "digest", "residency")
    yield from text_table(header, table, words=(0, 4, 5)).splitlines()


def _requests(view: View) -> Iterator[str]:
    if not view.requests:
        return
    yield ""
    table = [
        (
            str(one["id"])[:30],
            str(one["adapter"] or "(base model)")[:30],
            one["state"],
            f"{one['age_seconds']:.1f} s",
            f"{one['num_prompt_tokens']:,}",
            f"{one['num_cached_tokens']:,}",
            f"{one['num_output_tokens']:,}",
        )
        for one in view.requests[:MOST_ROWS]
    ]
    header = ("newest requests", "adapter", "state", "age", "prompt", "cached", "output")
    yield from text_table(header, table, words=(0, 1, 2)).splitlines()


def _line(title: str, text: str) -> str:
    return f"{title:<{TITLE_WIDTH}}{text}"


def _bar(share: float) -> str:
    done = round(min(1.0, max(0.0, share)) * BAR_WIDTH)
    return "█" * done + "░" * (BAR_WIDTH - done)
