"""python -m benchmarks.speed.overhead: a decode step's time by part, as table and JSON.

Run it on an idle machine. "Python" is the step without what the native code takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.facts import write_facts
from benchmarks.speed.overhead.engine import SHAPES, Parts, Threads, decode_steps
from benchmarks.speed.overhead.stopwatch import medians
from lora_serve.ops.cpu.threads import default_num_threads

COLUMNS = ("schedule", "batch", "forward", "kernels", "sample", "update", "rest", "reply")
HEAD = "| model | requests | step us | " + " | ".join(COLUMNS) + " | Python |"
RULE = "|---" * 2 + "|--:" * (len(COLUMNS) + 2) + "|"


@dataclass(frozen=True, slots=True)
class Row:
    """Median microseconds of each part. forward: what is around its kernels.

    rest: of the step, outside of all other parts. python_share: of the step, all but kernels and
    sampling.
    """

    model: str
    num_requests: int
    step: float
    parts: Parts
    python_share: float


def row_of(model: str, num_requests: int, steps: Sequence[Parts]) -> Row:
    seconds = [_without_overlap(step) for step in steps]
    found = {part: time * 1e6 for part, time in medians(seconds).items()}
    parts = {**dict.fromkeys(COLUMNS, 0.0), **found}  # a greedy step may sample nothing
    step = parts.pop("step")
    native = parts["kernels"] + parts["sample"]
    return Row(model, num_requests, step, parts, 1 - native / step)


def _without_overlap(step: Parts) -> Parts:
    """The kernels lie inside the forward pass; what lies in no part is the rest."""
    parts = {**step, "forward": step["forward"] - step["kernels"]}
    known = sum(time for part, time in parts.items() if part != "step")
    return {**parts, "rest": step["step"] - known}


def table_line(row: Row) -> str:
    cells = [f"{row.parts[column]:.0f}" for column in COLUMNS]
    return (
        f"| {row.model} | {row.num_requests} | {row.step:.0f} | {' | '.join(cells)} | "
        f"{row.python_share:.1%} |"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # no other pool beside the kernels' own
    threads = Threads(arguments.threads, arguments.pin)
    rows = []
    print(HEAD, RULE, sep="\n", flush=True)
    for model in arguments.model:
        for num_requests in arguments.requests:
            steps = decode_steps(SHAPES[model], threads, num_requests, arguments.steps)
            rows.append(row_of(model, num_requests, steps))
            print(table_line(rows[-1]), flush=True)
    write_facts(arguments.out, threads=threads, rows=rows)


if __name__ == "__main__":
    main()
