"""Draw runs as PNG or SVG, where matplotlib is installed (`pip install 'lora-serve[bench]'`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lora_serve.bench.load import LoadResult
from lora_serve.bench.summary import summarize
from lora_serve.errors import ConfigError

MOST_POINTS = 400  # of a curve; more are not seen
SUFFIXES = (".png", ".svg", ".pdf")
NO_PLOTS = "no plots: matplotlib is not installed; pip install 'lora-serve[bench]' brings it"


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def check_plot_path(path: Path) -> None:
    """Raise ConfigError for a file type that cannot be drawn, before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: want a name that ends in {', '.join(SUFFIXES)}")


def plot_latencies(results: Mapping[str, LoadResult], path: Path) -> None:
    """How latencies spread: first tokens, later tokens and, with many adapters, by adapter.

    Args:
        results: by the label each one gets.
        path: file to write; its suffix chooses the format.
    """
    from matplotlib.figure import Figure  # slow to import, and optional

    by_adapter = any(len(summarize(result).by_adapter) > 1 for result in results.values())
    figure = Figure(figsize=(5 * (2 + by_adapter), 3.6), layout="constrained")
    axes = figure.subplots(1, 2 + by_adapter)
    for label, result in results.items():
        done = [record for record in result.records if record.error is None]
        _draw_shares(axes[0], [record.ttft_seconds for record in done], label)
        _draw_shares(axes[1], [gap for record in done for gap in record.gaps_seconds], label)
        if by_adapter:
            _draw_adapters(axes[2], result, label)
    _name(axes[0], "time to first token, ms", "share of requests")
    _name(axes[1], "inter-token latency, ms", "share of tokens")
    if by_adapter:
        _name(axes[2], "adapter, most requests first", "median time to first token, ms")
    _save(figure, path)


def plot_bars(values: Mapping[str, Mapping[str, float]], label: str, path: Path) -> None:
    """One group of bars a row, one bar a column: values[row][column], 1.0 marked by a line."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(column for row in values.values() for column in row))
    width = 0.8 / max(1, len(columns))
    figure = Figure(
        figsize=(9, 0.7 + 0.22 * len(values) * (len(columns) + 1)), layout="constrained"
    )
    axes = figure.subplots()
    for number, column in enumerate(columns):
        places = [
            place + width * number for place, row in enumerate(values.values()) if column in row
        ]
        axes.barh(places, [row[column] for row in values.values() if column in row], width,
                  label=column)  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([place + 0.4 - width / 2 for place in range(len(values))], list(values))
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_lines(
    panels: Mapping[str, Mapping[str, Mapping[float, float]]], x_label: str, path: Path
) -> None:
    """Panels side by side over one logarithmic axis: panels[y label][line][x] is y."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    for axes, (y_label, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for label, points in lines.items():
            axes.plot(list(points), list(points.values()), "o-", markersize=4, label=label)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        _name(axes, x_label, y_label)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):  # letters as text: as outlines they are most of it
        figure.savefig(path)


def _draw_shares(axes: Any, seconds: Sequence[float], label: str) -> None:
    if seconds:
        ordered = sorted(1e3 * value for value in seconds)
        shares = sorted(
            {round(i * (len(ordered) - 1) / MOST_POINTS) for i in range(MOST_POINTS + 1)}
        )
        axes.step(
            [ordered[0], *(ordered[i] for i in shares)],
            [0.0, *((i + 1) / len(ordered) for i in shares)],
            where="post",
            label=label,
        )


def _draw_adapters(axes: Any, result: LoadResult, label: str) -> None:
    groups = sorted(summarize(result).by_adapter.values(), key=lambda group: -group.num_requests)
    medians = [group.ttft.p50 for group in groups if group.ttft]
    axes.plot(range(1, len(medians) + 1), medians, ".", label=label)


def _name(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:  # nothing was drawn where all requests failed
        axes.legend(fontsize="small")
