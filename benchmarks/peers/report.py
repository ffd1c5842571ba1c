"""One run over all engines as a page for people (markdown, bars) and as JSON for machines."""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.common.facts import write_json
from benchmarks.common.limits import MachineLimits
from benchmarks.common.page import folded, replace_between_marks
from benchmarks.peers.measurements import RUNNING, Figure, Phase, Row, figure_of
from benchmarks.peers.phases import PHASES
from lora_serve.bench.machine import Machine
from lora_serve.bench.plots import NO_PLOTS, can_plot, plot_bars

FORMAT = "lora-serve/peers/3"
OURS = "lora-serve"
MARKS = "peers"
DISTURBED_CORES = 0.2
ROWS = {row.key: row for phase in PHASES for m in phase.measurements for row in m.rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One engine's figures, by row; and for what has none, the reason.

    limits: by row, what the machine was capable of around each run of the row's figure.
    """

    name: str
    notes: str
    figures: dict[str, Figure] = field(default_factory=dict)
    limits: dict[str, tuple[MachineLimits, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def without(self, keys: Container[str]) -> EngineResult:
        return replace(
            self,
            figures={key: figure for key, figure in self.figures.items() if key not in keys},
            limits={key: limits for key, limits in self.limits.items() if key not in keys},
            reasons={key: reason for key, reason in self.reasons.items() if key not in keys},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFacts:
    """When a phase was measured, on what.

    date: of its begin, as YYYY-MM-DD. load_average: over the minute before.
    busy_cores: what was used of the machine while all its servers were idle.
    """

    date: str
    commit: str
    load_average: float
    busy_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """Phases measured on one machine. Engines are compared within a phase, so it is one run."""

    machine: Machine
    engines: tuple[EngineResult, ...]
    phases: dict[str, PhaseFacts] = field(default_factory=dict)

    def engine(self, name: str) -> EngineResult:
        return next(engine for engine in self.engines if engine.name == name)

    def without(self, phases: Iterable[Phase]) -> PeerRun:
        """What was measured in all others."""
        names = {phase.name for phase in phases}
        keys = {key for phase in phases for key in phase.keys}
        return PeerRun(
            machine=self.machine,
            engines=tuple(engine.without(keys) for engine in self.engines),
            phases={name: facts for name, facts in self.phases.items() if name not in names},
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """What something costs within one engine: the speed with it over the speed without."""

    title: str
    with_it: str
    without: str


COSTS = (
    Cost("prefill with one adapter, of the base's speed", "prefill-adapter", "prefill-base"),
    Cost("decode with one adapter, of the base's speed", "decode-adapter", "decode-base"),
    Cost("8 requests of one adapter, of the base's speed", "decode-8-of-1", "decode-8-base"),
    Cost("8 requests of 8 adapters, of the speed of 8 of one", "decode-8-of-8", "decode-8-of-1"),
    Cost("4 adapters with hot prefixes, of the cold speed", "four-hot", "four-cold"),
    Cost("1,000 registered adapters, of the speed with 4", "zipf-1000", "zipf-4"),
)


def read_run(stem: Path) -> PeerRun:
    """What `write_report` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    document = msgspec.json.decode(stem.with_suffix(".json").read_bytes())
    if document.get("format") != FORMAT:
        raise ValueError(f"{stem}.json is of format {document.get('format')}, not {FORMAT}")
    return msgspec.convert(document["run"], PeerRun)


def write_report(run: PeerRun, stem: Path, page: Path | None) -> None:
    """Write stem.json, stem.md and, if it can be drawn, stem.svg; put the tables into `page`.

    Raises:
        ValueError: the page has no place for them.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, "rows": {k: _named(row) for k, row in ROWS.items()}, "run": run}
    write_json(stem.with_suffix(".json"), document)
    text = folded(markdown(run))
    stem.with_suffix(".md").write_text(text)
    if page is not None:
        page.write_text(replace_between_marks(page.read_text(), MARKS, text))
    if not can_plot():
        print(NO_PLOTS)
    elif bars := _bars(run):
        label = "speed of lora-serve over that of the peer"
        plot_bars(bars, label, stem.with_suffix(".svg"))


def markdown(run: PeerRun) -> str:
    parts = [_machine(run), _figures(run), _costs(run), _notes(run), _reasons(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def speed_ratio(row: Row, ours: Figure, theirs: Figure) -> float:
    """How many times as fast ours is."""
    if row.unit == "ms":
        return theirs.value / ours.value
    return ours.value / theirs.value


def _machine(run: PeerRun) -> str:
    machine = run.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"{machine.cpu}, {machine.num_cores} cores, {machine.memory_gib:g} GiB, {machine.system}, "
        f"Python {machine.python}, {packages}; {_when(run)}.{_limits_seen(run)}{_disturbance(run)}"
    )


def _when(run: PeerRun) -> str:
    """Date and commit, of each phase if they differ."""
    by_commit: dict[str, list[str]] = {}
    for name, facts in run.phases.items():
        by_commit.setdefault(f"{facts.date}, commit {facts.commit}", []).append(name)
    if len(by_commit) == 1:
        return next(iter(by_commit))
    return "; ".join(f"{when} ({', '.join(names)})" for when, names in by_commit.items())


def _limits_seen(run: PeerRun) -> str:
    seen = [one for engine in run.engines for limits in engine.limits.values() for one in limits]
    if not seen:
        return ""
    memory, products, library = (
        _span([getattr(limits, name) for limits in seen])
        for name in ("gb_per_second", "gflops", "library_gflops")
    )
    return (
        f" What the machine was capable of between the engines' turns: {memory} GB/s read "
        f"from memory, {products} GFLOP/s of bf16 products (torch's own: {library})."
    )


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def _figures(run: PeerRun) -> str:
    names = [engine.name for engine in run.engines]
    lines = []
    for key, row in ROWS.items():
        if any(key in engine.figures for engine in run.engines):
            cells = [_cell(run, row, engine) for engine in run.engines]
            what = f"`{key}`: {row.title}, {_unit(row)}"
            lines.append([what, *cells, _limit_cell(run, row)])
    return _table(["", *names, "limit"], lines)


def _limit_cell(run: PeerRun, row: Row) -> str:
    """The machine's limit around our runs, and how much of it they reached: medians of both."""
    ours = _ours(run)
    if ours is None or row.key not in ours.limits or row.limit is None:
        return ""
    allowed = [row.limit(around) for around in ours.limits[row.key]]
    runs = zip(ours.figures[row.key].values, allowed, strict=True)
    reached = [speed_ratio(row, figure_of([value]), figure_of([limit])) for value, limit in runs]
    return f"{_number(statistics.median(allowed))} ({statistics.median(reached):.0%})"


def _cell(run: PeerRun, row: Row, engine: EngineResult) -> str:
    figure = engine.figures.get(row.key)
    if figure is None:
        return "not run"
    ours = _ours(run)
    if engine is ours or ours is None or row.key not in ours.figures:
        return _number(figure.value)
    return f"{_number(figure.value)} ({speed_ratio(row, ours.figures[row.key], figure):.2f}×)"


def _costs(run: PeerRun) -> str:
    lines = []
    for cost in COSTS:
        cells = [_cost(cost, engine) for engine in run.engines]
        if any(cells):
            lines.append([cost.title, *(cell or "not run" for cell in cells)])
    return _table(["", *(engine.name for engine in run.engines)], lines) if lines else ""


def _cost(cost: Cost, engine: EngineResult) -> str:
    """The median over pairs of runs that followed each other, where each had as many."""
    with_it, without = engine.figures.get(cost.with_it), engine.figures.get(cost.without)
    if with_it is None or without is None:
        return ""
    pairs = [(with_it, without)]
    if len(with_it.values) == len(without.values):
        runs = zip(with_it.values, without.values, strict=True)
        pairs = [(figure_of([one]), figure_of([other])) for one, other in runs]
    kept = [speed_ratio(ROWS[cost.with_it], one, other) for one, other in pairs]
    return f"{statistics.median(kept):.0%}"


def _notes(run: PeerRun) -> str:
    lines = [f"- {engine.name}: {engine.notes}." for engine in run.engines]
    ratio = (
        "In brackets: how many times as fast lora-serve is; at the limit, how much of it "
        "lora-serve reached."
    )
    return f"{ratio} At most {RUNNING} requests run at once.\n\n" + "\n".join(lines)


def _disturbance(run: PeerRun) -> str:
    worst = max((facts.busy_cores for facts in run.phases.values()), default=0.0)
    if worst < DISTURBED_CORES:
        return ""
    return f" **Disturbed: up to {worst:.1f} cores were in use while all servers were idle.**"


def _reasons(run: PeerRun) -> str:
    """Each reason once, with the rows that it left empty."""
    lines = []
    for engine in run.engines:
        missing = {k: why for k, why in engine.reasons.items() if k not in engine.figures}
        for why in dict.fromkeys(missing.values()):
            keys = ", ".join(f"`{key}`" for key, reason in missing.items() if reason == why)
            lines.append(f"- {engine.name}, {keys}: {why}.")
    return "Not run:\n\n" + "\n".join(lines) if lines else ""


def _bars(run: PeerRun) -> dict[str, dict[str, float]]:
    ours = _ours(run)
    bars: dict[str, dict[str, float]] = {}
    for key, row in ROWS.items():
        for engine in run.engines:
            if ours and engine is not ours and key in engine.figures and key in ours.figures:
                ratio = speed_ratio(row, ours.figures[key], engine.figures[key])
                bars.setdefault(key, {})[engine.name] = ratio
    return bars


def _ours(run: PeerRun) -> EngineResult | None:
    return next((engine for engine in run.engines if engine.name == OURS), None)


def _unit(row: Row) -> str:
    return "ms" if row.unit == "ms" else "tokens/s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _named(row: Row) -> dict[str, str]:
    return {"title": row.title, "unit": row.unit}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
