"""Goodput under overload: `python -m benchmarks.overload`. Serves the demo's tiny model.

First a closed loop that keeps every seat taken gives the peak. Then twice as many requests a second
arrive as were answered then, whether or not they are answered; a bounded queue refuses the rest.
Goodput is tokens of complete answers a second.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from lora_serve.bench.client import Endpoint
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import LoadResult, run_load
from lora_serve.bench.machine import describe_machine
from lora_serve.bench.server import lora_serve_command, running_server
from lora_serve.bench.workload import WorkloadSpec, make_workload
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import free_port

NUM_SEATS = 16
SHAPE = {"input_tokens": 64, "output_tokens": 64, "vocab_size": 300}


async def measure(num_requests: int, overload: float) -> tuple[LoadResult, LoadResult]:
    """The closed loop, and the open one above it."""
    port = free_port()
    flags = ("--max-num-seqs", str(NUM_SEATS), "--max-num-queued-reqs", str(NUM_SEATS))
    command = lora_serve_command(str(ensure_demo(print).model), port, flags)
    log = Path(tempfile.mkdtemp(prefix="overload-")) / "server.log"
    url = f"http://127.0.0.1:{port}"
    endpoint = Endpoint(Origin.parse(url), str(ensure_demo(print).model))
    async with running_server(command, url, log):
        warmup = make_workload(WorkloadSpec(seed=1, num_requests=2 * NUM_SEATS, **SHAPE))
        await run_load(endpoint, warmup, NUM_SEATS)
        closed = make_workload(WorkloadSpec(seed=2, num_requests=num_requests, **SHAPE))
        peak = await run_load(endpoint, closed, 2 * NUM_SEATS)
        assert not any(record.error for record in peak.records), "the peak must be without errors"
        rate = overload * num_requests / peak.wall_seconds
        spec = WorkloadSpec(
            seed=3, num_requests=int(overload * num_requests), request_rate=rate, **SHAPE
        )
        return peak, await run_load(endpoint, make_workload(spec))


def goodput(result: LoadResult) -> float:
    tokens = sum(record.output_tokens for record in result.records if record.error is None)
    return tokens / result.wall_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--overload", type=float, default=2.0)
    args = parser.parse_args()
    peak, above = asyncio.run(measure(args.num_requests, args.overload))
    machine = describe_machine()
    print(f"{machine.cpu}, {machine.num_cores} cores, load average {machine.load_average}")
    refused = sum(record.error is not None for record in above.records)
    share = 100 * goodput(above) / goodput(peak)
    print(f"peak {goodput(peak):.0f} tokens/s with {2 * NUM_SEATS} requests in a closed loop")
    print(
        f"at {args.overload:g} times that rate {goodput(above):.0f} tokens/s, {share:.0f} % of it"
    )
    print(f"({refused} of {len(above.records)} refused)")


if __name__ == "__main__":
    main()
