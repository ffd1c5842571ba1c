"""What was measured, as JSON and as a page of tables. Formats numbers; computes none but shares."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.engine import DecodeTiming, FirstTokenTiming
from benchmarks.gpu.kernels import KernelTiming
from benchmarks.gpu.peer import PeerTiming
from lora_serve.bench.machine import Machine


@dataclass(slots=True)
class EngineTimings:
    """Times of a shape with one choice of settings. prefill: tokens per second by prompt length."""

    load_seconds: float = 0.0
    num_blocks: int = 0
    decode: list[DecodeTiming] = field(default_factory=list)
    prefill: dict[int, float] = field(default_factory=dict)
    first_token: list[FirstTokenTiming] = field(default_factory=list)


@dataclass(slots=True)
class ShapeReport:
    """One shape. weight_bytes: what a decode step reads at least; flops_per_token: of prefill.

    served: by the settings of a server. exact: with --batch-invariant. serial: with
    --no-async-scheduling. separate: with --no-overlap-launches; of the first shape alone.
    """

    name: str
    weight_bytes: float
    flops_per_token: float
    served: EngineTimings = field(default_factory=EngineTimings)
    exact: EngineTimings = field(default_factory=EngineTimings)
    serial: EngineTimings = field(default_factory=EngineTimings)
    separate: EngineTimings = field(default_factory=EngineTimings)
    kernels: list[KernelTiming] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """finished: the parts that are complete. notes: what was left out, and why."""

    device: str
    machine: Machine
    ceilings: Ceilings
    shapes: list[ShapeReport] = field(default_factory=list)
    peers: list[PeerTiming] = field(default_factory=list)
    peer_shape: str = ""
    finished: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self, directory: Path) -> Path:
        """<stem>.json and .md, each whole at any time; the path of the second."""
        directory.mkdir(parents=True, exist_ok=True)
        stem = directory / stem_of(self.device)
        _replace(stem.with_suffix(".json"), json.dumps(asdict(self), indent=1) + "\n")
        page = stem.with_suffix(".md")
        _replace(page, "\n\n".join(self.sections()) + "\n")
        return page

    def sections(self) -> Iterable[str]:
        packages = ", ".join(f"{name} {found}" for name, found in self.machine.packages.items())
        yield f"# {self.device}"
        yield (
            f"Commit {self.machine.commit}, Python {self.machine.python}, {packages}. Measured "
            f"ceilings: copies {self.ceilings.copy_gb_per_second:.0f} GB/s, reads "
            f"{self.ceilings.read_gb_per_second:.0f} GB/s, bfloat16 products "
            f"{self.ceilings.bf16_tflops:.0f} TFLOP/s. Weights are random."
        )
        for shape in self.shapes:
            yield from _shape_sections(shape, self.ceilings)
        if self.peers:
            rows = [(p.name, p.num_requests, f"{p.tokens_per_second:.0f}") for p in self.peers]
            yield f"## Beside it, {self.peer_shape}"
            yield _table(("who", "requests", "tokens/s"), rows)
        yield from self.notes


def stem_of(device: str) -> str:
    """gpu-<name of the card>."""
    return "gpu-" + "-".join(device.lower().split())


def begin_report(directory: Path, device: str, machine: Machine, ceilings: Ceilings) -> Report:
    """The report that an earlier run of the same code began there, or a new one."""
    new = Report(device, machine, ceilings)
    path = directory / f"{stem_of(device)}.json"
    if not path.is_file():
        return new
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError:  # of an earlier form
        return new
    # The results that an earlier run wrote may be changes themselves.
    commits = {each.commit.removesuffix("+changes") for each in (found.machine, machine)}
    if found.device != device or len(commits) > 1 or not found.machine.is_like(machine):
        return new
    return replace(found, ceilings=ceilings, notes=[])


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f"{path.name}.new")
    written.write_text(text)
    written.replace(path)


def _shape_sections(shape: ShapeReport, ceilings: Ceilings) -> Iterable[str]:
    served = shape.served
    yield f"## {shape.name}: loaded in {served.load_seconds:.1f} s, {served.num_blocks} KV blocks"
    yield "Decode. Limit: reading every weight once at the rate of the ceilings."
    yield _decode_table(shape, ceilings)
    yield "Prefill. Limit: the products at the rate of the ceilings."
    yield _table(
        ("prompt", "tokens/s", "of the limit", "batch-invariant, tokens/s"),
        [
            (
                length,
                f"{rate:.0f}",
                f"{rate * shape.flops_per_token / ceilings.bf16_tflops / 1e12:.0%}",
                _number(shape.exact.prefill.get(length)),
            )
            for length, rate in served.prefill.items()
        ],
    )
    yield "First token of a lone request; each asks for the next of so many adapters."
    yield _table(
        ("adapters", "median ms", "worst ms"),
        [
            (t.num_adapters, f"{t.median_ms:.2f}", f"{t.worst_ms:.2f}")
            for t in shape.served.first_token
        ],
    )
    yield "Kernels. Limit: the nearer ceiling; of KV blocks, one plain copy of as many bytes."
    yield _table(
        ("kernel", "us", "TFLOP/s", "GB/s", "of the limit"),
        [
            (
                t.name,
                f"{t.microseconds:.1f}",
                f"{t.tflops:.1f}",
                f"{t.gb_per_second:.0f}",
                f"{t.share:.0%}",
            )
            for t in shape.kernels
        ],
    )


def _decode_table(shape: ShapeReport, ceilings: Ceilings) -> str:
    limit_ms = shape.weight_bytes / ceilings.gb_per_second / 1e6
    served = shape.served
    exact = {(t.num_requests, t.num_adapters): t for t in shape.exact.decode}
    serial = {(t.num_requests, t.num_adapters): t for t in shape.serial.decode}
    separate = {(t.num_requests, t.num_adapters): t for t in shape.separate.decode}
    base = {t.num_requests: t.step_ms for t in served.decode if not t.num_adapters}
    return _table(
        (
            *("requests", "adapters", "ms a step", "tokens/s", "of the limit", "of base"),
            *("card idle", "steps not overlapped, ms", "card idle", "batch-invariant, ms"),
            "launches not overlapped, ms",
        ),
        [
            (
                t.num_requests,
                t.num_adapters,
                f"{t.step_ms:.2f}",
                f"{t.tokens_per_second:.0f}",
                f"{limit_ms / t.step_ms:.0%}",
                _share(base.get(t.num_requests), t.step_ms),
                _idle(t),
                _step_ms(serial.get((t.num_requests, t.num_adapters))),
                _idle(serial.get((t.num_requests, t.num_adapters))),
                _step_ms(exact.get((t.num_requests, t.num_adapters))),
                _step_ms(separate.get((t.num_requests, t.num_adapters))),
            )
            for t in served.decode
        ],
    )


def _share(whole: float | None, part: float) -> str:
    return f"{whole / part:.0%}" if whole is not None else ""


def _step_ms(timing: DecodeTiming | None) -> str:
    return _number(timing.step_ms if timing else None)


def _idle(timing: DecodeTiming | None) -> str:
    return f"{timing.idle_share:.1%}" if timing and timing.idle_share is not None else ""


def _number(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
