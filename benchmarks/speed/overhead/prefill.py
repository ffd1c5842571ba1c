"""python -m benchmarks.speed.overhead.prefill: a prompt's time by kernel, as table and JSON.

Run it on an idle machine. "Rest" is what lies in no kernel: Python, and torch between them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.common.facts import write_facts
from benchmarks.speed.overhead.engine import KERNELS, SHAPES, Threads, prefill_steps
from benchmarks.speed.overhead.stopwatch import medians
from lora_serve.ops.cpu.threads import default_num_threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 1024])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", choices=SHAPES, default="Qwen2.5-0.5B")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # no other pool beside the kernels' own
    threads = Threads(arguments.threads)
    milliseconds = {
        num_tokens: prefill_times(arguments.model, threads, num_tokens, arguments.steps)
        for num_tokens in arguments.tokens
    }
    columns = ["step", *KERNELS, "rest"]
    print("| tokens | " + " | ".join(columns) + " |", "|--:" * (len(columns) + 1) + "|", sep="\n")
    for num_tokens, times in milliseconds.items():
        cells = [f"{times[column]:.1f}" for column in columns]
        print(f"| {num_tokens:,} | {' | '.join(cells)} |")
    write_facts(arguments.out, threads=threads, model=arguments.model, milliseconds=milliseconds)


def prefill_times(
    model: str, threads: Threads, num_tokens: int, num_steps: int
) -> dict[str, float]:
    """Median milliseconds of a step, of each kernel in it, and of what lies in none of them."""
    found = medians(prefill_steps(SHAPES[model], threads, num_tokens, num_steps))
    times = {name: 1e3 * found.get(name, 0.0) for name in ("step", *KERNELS)}
    return {**times, "rest": times["step"] - sum(times[kernel] for kernel in KERNELS)}


if __name__ == "__main__":
    main()
