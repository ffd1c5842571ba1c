"""One process against replicas with the same cores, and ways to choose among replicas.

`python -m benchmarks.fleet.policies` serves the demo's model with many adapters, asks for answers
whose prompts share beginnings by adapter, and prints a row for each server: goodput, time to the
first token, tokens found in the cache. --out keeps the figures, if nothing else is busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.common.busy import busy_cores
from benchmarks.common.facts import write_facts
from lora_serve.bench.client import EVERY_TOKEN
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import ServerProcess

BASE = "base"
TOKENS = range(3, 700)  # of the demo's vocabulary
MAX_BUSY_CORES = 0.2
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Workload:
    """num_clients ask at once, each again when it has its answer. Lengths are in tokens."""

    num_adapters: int = 64
    prefixes_per_adapter: int = 2
    prefix_tokens: int = 512
    tail_tokens: int = 32
    max_tokens: int = 16
    num_requests: int = 600
    num_clients: int = 16
    slo_seconds: float = 1.0  # to the first token, for an answer to count as good

    def bodies(self) -> Iterator[dict[str, object]]:
        """The requests, the same ones at each call; a few adapters are asked for most."""
        draw = random.Random(0)
        prefixes = {
            (adapter, number): [draw.choice(TOKENS) for _ in range(self.prefix_tokens)]
            for adapter in range(self.num_adapters)
            for number in range(self.prefixes_per_adapter)
        }
        popularity = [1 / (rank + 1) for rank in range(self.num_adapters)]
        for _ in range(self.num_requests):
            (adapter,) = draw.choices(range(self.num_adapters), popularity)
            prefix = prefixes[adapter, draw.randrange(self.prefixes_per_adapter)]
            tail = [draw.choice(TOKENS) for _ in range(self.tail_tokens)]
            yield {
                "model": f"a{adapter}",
                "prompt": prefix + tail,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                **EVERY_TOKEN,
            }


@dataclass(frozen=True, slots=True)
class Row:
    """Times in milliseconds. hits: the share of prompt tokens that was found in the cache."""

    server: str
    goodput: float
    first_token_median: float
    first_token_p99: float
    hits: float

    def __str__(self) -> str:
        return (
            f"| {self.server} | {self.goodput:.1f} | {self.first_token_median:.0f} | "
            f"{self.first_token_p99:.0f} | {self.hits:.0%} |"
        )


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    if args.out is not None and (busy := busy_cores()) > MAX_BUSY_CORES:
        sys.exit(f"{busy:.1f} cores are busy with something else: figures would say little")
    workload = Workload(num_requests=args.num_requests)
    cores = os.cpu_count() or 1
    demo = ensure_demo(print)
    shared = (
        "--replicas",
        str(args.replicas),
        "--cpu-threads",
        str(max(1, cores // args.replicas)),
    )
    servers = {"one process": ("--cpu-threads", str(cores))} | {
        f"{args.replicas} replicas, {policy}": (*shared, "--routing-policy", policy)
        for policy in ("affinity", "round-robin", "least-loaded")
    }
    rows = []
    print("| server | good answers/s | first token, median ms | p99 ms | cache hits |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        modules = list(_adapters(demo.alpha, Path(directory), workload.num_adapters))
        for name, own in servers.items():
            flags = (*_flags(modules, args), *own)
            with ServerProcess(demo.model, flags, Path(directory) / "log") as server:
                server.wait_until_healthy()
                rows.append(asyncio.run(_measure(name, server.base_url, workload)))
            print(rows[-1], flush=True)
    write_facts(args.out, workload=workload, rows=rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--num-requests", type=int, default=600)
    parser.add_argument("--max-cpu-loras", type=int, default=24)
    parser.add_argument("--num-gpu-blocks-override", type=int, default=1200)
    parser.add_argument("--out", type=Path)
    return parser


def _flags(modules: Sequence[str], args: argparse.Namespace) -> tuple[str, ...]:
    """Flags of every server: adapters and cached prefixes fit into no single engine."""
    return (
        *("--served-model-name", BASE, "--enable-lora", "--max-loras", "8"),
        *("--max-cpu-loras", str(args.max_cpu_loras), "--lora-modules", *modules),
        *("--num-gpu-blocks-override", str(args.num_gpu_blocks_override), "--disable-log-requests"),
    )


def _adapters(source: Path, parent: Path, count: int) -> Iterator[str]:
    """Adapters of other weights each, for --lora-modules: equal ones would be one in memory."""
    weights = load_file(source / WEIGHTS)
    for number in range(count):
        path = parent / f"a{number}"
        path.mkdir()
        scaled = {k: (v * np.float32(1 + number / 100)).astype(v.dtype) for k, v in weights.items()}
        save_file(scaled, path / WEIGHTS)
        (path / CONFIG).write_text((source / CONFIG).read_text())
        yield f"a{number}={path}"


async def _measure(name: str, base_url: str, workload: Workload) -> Row:
    bodies = workload.bodies()
    first_tokens: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=600, limits=limits) as http:
        begun = time.perf_counter()

        async def ask() -> None:
            for body in bodies:
                first_tokens.append(await _first_token(http, body))

        async with asyncio.TaskGroup() as group:
            for _ in range(workload.num_clients):
                group.create_task(ask())
        seconds = time.perf_counter() - begun
        page = (await http.get("/metrics")).text
    times = sorted(first_tokens)
    return Row(
        server=name,
        goodput=sum(each <= workload.slo_seconds for each in times) / seconds,
        first_token_median=1000 * statistics.median(times),
        first_token_p99=1000 * times[int(0.99 * len(times))],
        hits=_total(page, "prefix_cache_hits") / max(1.0, _total(page, "prefix_cache_queries")),
    )


async def _first_token(http: httpx.AsyncClient, body: dict[str, object]) -> float:
    """Seconds until the first token of an answer, which is read to its end."""
    begun = time.perf_counter()
    first = None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begun
                error = json.loads(line.removeprefix("data: ")).get("error")
                assert error is None, error
    assert first is not None, "an answer has tokens"
    return first


def _total(page: str, name: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith(f"vllm:{name}_total{{")]
    return sum(float(line.split()[-1]) for line in lines)


if __name__ == "__main__":
    main()
