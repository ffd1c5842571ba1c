"""One figure of a soak: panels over one time axis, faults marked in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.soak.journal import ANSWERED, Event
from benchmarks.soak.samples import Sample

COLOURS = {"engine killed": "tab:red", "Redis killed": "tab:purple", "Redis paused": "thistle",
           "flood": "lightgrey"}  # fmt: skip
NUM_COLOURS = 64


def plot_soak(samples: Sequence[Sample], events: Sequence[Event], path: Path) -> None:
    """Write the figure as PNG, with so few colours that it stays below 100 kB."""
    from matplotlib.figure import Figure  # slow to import
    from PIL import Image

    minutes = [sample.seconds / 60 for sample in samples]
    figure = Figure(figsize=(10, 12.5), layout="constrained")
    panels = figure.subplots(7, 1, sharex=True)
    _memory(panels[0], minutes, samples)
    _lines(panels[1], minutes, {"KV blocks in use": [s.used_blocks for s in samples]})
    panels[1].axhline(max(s.num_blocks for s in samples), color="black", linewidth=0.8)
    _lines(panels[2], minutes, {
        "running": [s.num_running for s in samples], "waiting": [s.num_waiting for s in samples],
        "adapter leases": [s.num_leases for s in samples],
    })  # fmt: skip
    _lines(panels[3], minutes, {
        "descriptors, API": [s.api.num_descriptors for s in samples],
        "descriptors, engine": [s.engine.num_descriptors for s in samples],
        "threads, API": [s.api.num_threads for s in samples],
        "threads, engine": [s.engine.num_threads for s in samples],
    })  # fmt: skip
    _lines(panels[4], minutes, {"answers/s": [s.answers_per_second for s in samples]})
    _lines(panels[5], minutes, {
        "latency p50, ms": [s.p50_ms or None for s in samples],
        "latency p99, ms": [s.p99_ms or None for s in samples],
    })  # fmt: skip
    panels[5].set_yscale("log")
    _lines(panels[6], minutes, _grown(samples))
    panels[6].set_ylabel("in 5 s")
    panels[6].set_xlabel("minutes")
    for axes in panels:
        _mark(axes, events, with_labels=axes is panels[0])
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    picture = BytesIO()
    figure.savefig(picture, format="png")
    with Image.open(picture) as full:
        few_colours = full.convert("RGB").quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE)
    few_colours.save(path, "PNG", optimize=True)


def _memory(axes: Any, minutes: Sequence[float], samples: Sequence[Sample]) -> None:
    _lines(axes, minutes, {
        "memory, API, MiB": [s.api.rss_bytes / 2**20 for s in samples],
        "memory, engine, MiB": [s.engine.rss_bytes / 2**20 or None for s in samples],
        "KV on disk, MiB": [s.disk_bytes / 2**20 for s in samples],
    })  # fmt: skip
    axes.set_ylim(bottom=0)


def _grown(samples: Sequence[Sample]) -> dict[str, list[float | None]]:
    """Outcomes other than answers, by kind: how many came in each period."""
    kinds = {kind for sample in samples for kind in sample.outcomes} - {ANSWERED}
    return {
        kind: [
            None,
            *(
                float(now.outcomes.get(kind, 0) - then.outcomes.get(kind, 0))
                for then, now in pairwise(samples)
            ),
        ]
        for kind in sorted(kinds)
    }


def _lines(axes: Any, minutes: Sequence[float], series: dict[str, Sequence[float | None]]) -> None:
    for label, values in series.items():
        axes.plot(minutes, [float("nan") if v is None else v for v in values], label=label,
                  linewidth=1)  # fmt: skip


def _mark(axes: Any, events: Sequence[Event], *, with_labels: bool) -> None:
    labelled = set() if with_labels else set(COLOURS)
    for event in events:
        label = None if event.what in labelled else event.what
        labelled.add(event.what)
        axes.axvline(event.seconds / 60, color=COLOURS[event.what], linewidth=0.8, zorder=0,
                     label=label)  # fmt: skip
