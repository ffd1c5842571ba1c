"""python -m benchmarks.speed.kernels: every CPU kernel against the machine's limits.

Run it on an idle machine; limits are measured in turns with the kernels all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.common.facts import write_facts
from benchmarks.speed.kernels.measure import Timing, huge_buffer, measure
from benchmarks.speed.kernels.works import all_works
from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.cpu.backend import CpuKernels
from lora_serve.ops.cpu.dtypes import dtype_code

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

HEAD = (
    "| kernel | threads | us | GFLOP/s | of | GB/s | of | share of the limit |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|"
)


def table_row(timing: Timing, num_threads: int) -> str:
    return (
        f"| {timing.name} | {num_threads} | {timing.microseconds:.1f} | {timing.gflops:.0f} | "
        f"{timing.limit_gflops:.0f} | {timing.gb_per_second:.1f} | "
        f"{timing.limit_gb_per_second:.1f} | {timing.share:.0%} |"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=usable_paths(), default=usable_paths()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--only", default="", help="works whose name contains this")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args()


def measure_all(arguments: argparse.Namespace, num_threads: int) -> Iterator[Timing]:
    kernels = CpuKernels(arguments.path, num_threads)
    dtype = DTYPES[arguments.dtype]
    buffer = huge_buffer()
    for work in all_works(kernels.ops(), dtype):
        if arguments.only in work.name:
            yield measure(work, kernels.native, dtype_code(dtype), buffer)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # no other pool beside the kernels' own
    timings = []
    print(HEAD, flush=True)
    for num_threads in arguments.threads:
        for timing in measure_all(arguments, num_threads):
            timings.append({"threads": num_threads, **asdict(timing)})
            print(table_row(timing, num_threads), flush=True)
    write_facts(arguments.out, path=arguments.path, dtype=arguments.dtype, timings=timings)


if __name__ == "__main__":
    main()
