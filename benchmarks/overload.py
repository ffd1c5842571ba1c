"""Goodput under overload: `python -m benchmarks.overload`. Client and server share the machine.

A closed loop that keeps every seat taken gives the peak. Then twice as many requests a second come
as were answered then, whether or not they are answered; a bounded queue refuses the rest. Then the
closed loop again: the better one of both counts. Goodput is tokens of complete answers a second
over the last three quarters of the time in which requests are sent: before, seats are still empty,
and beside what ends later they are empty again.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.facts import write_facts
from benchmarks.make_checkpoint import ensure_checkpoint
from lora_serve.bench.client import Endpoint, RequestRecord
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import run_load
from lora_serve.bench.server import lora_serve_command, running_server
from lora_serve.bench.workload import TimedRequest, WorkloadSpec, make_workload
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import free_port

NUM_SEATS = 16
IN_LOOP = 2 * NUM_SEATS
SHAPE = {"input_tokens": 64, "output_tokens": 64, "vocab_size": 300}


@dataclass(frozen=True, slots=True)
class Answer:
    """at_seconds: when it was complete."""

    at_seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Goodput:
    """Tokens a second: of the closed loop before and after, and of the open one above it."""

    before: float
    above: float
    after: float
    num_requests: int
    num_refused: int

    @property
    def peak(self) -> float:
        return max(self.before, self.after)


async def measure(model: Path, num_requests: int, overload: float) -> Goodput:
    port = free_port()
    flags = ("--max-num-seqs", str(NUM_SEATS), "--max-num-queued-reqs", str(NUM_SEATS))
    command = lora_serve_command(str(model), port, flags)
    log = Path(tempfile.mkdtemp(prefix="overload-")) / "server.log"
    url = f"http://127.0.0.1:{port}"
    endpoint = Endpoint(Origin.parse(url), str(model))
    async with running_server(command, url, log):
        warmup = make_workload(WorkloadSpec(seed=1, num_requests=2 * NUM_SEATS, **SHAPE))
        await run_load(endpoint, warmup, NUM_SEATS)
        before = await closed_loop(endpoint, num_requests, seed=2)
        rate = overload * before / SHAPE["output_tokens"]
        spec = WorkloadSpec(
            seed=3, num_requests=int(overload * num_requests), request_rate=rate, **SHAPE
        )
        arrivals = make_workload(spec)
        ended = await answers(endpoint, arrivals)
        above = goodput(ended, until=arrivals[-1].at_seconds)
        after = await closed_loop(endpoint, num_requests, seed=4)
    return Goodput(before, above, after, len(arrivals), len(arrivals) - len(ended))


async def closed_loop(endpoint: Endpoint, num_requests: int, seed: int) -> float:
    """Its goodput."""
    workload = make_workload(WorkloadSpec(seed=seed, num_requests=num_requests, **SHAPE))
    ended = await answers(endpoint, workload, IN_LOOP)
    assert len(ended) == num_requests, "the peak must be without errors"
    return goodput(ended, until=ended[-IN_LOOP - 1].at_seconds)


async def answers(
    endpoint: Endpoint, workload: Sequence[TimedRequest], max_concurrency: int | None = None
) -> list[Answer]:
    """The complete ones, as they ended."""
    ended: list[Answer] = []
    start = time.perf_counter()

    def note(record: RequestRecord) -> None:
        if record.error is None:
            ended.append(Answer(time.perf_counter() - start, record.output_tokens))

    await run_load(endpoint, workload, max_concurrency, note)
    return ended


def goodput(ended: Sequence[Answer], until: float) -> float:
    since = until / 4
    tokens = sum(answer.tokens for answer in ended if since < answer.at_seconds <= until)
    return tokens / (until - since)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, help="of 0.5B, made if it is not there; else the demo's model"
    )
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--overload", type=float, default=2.0)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    model = ensure_checkpoint(args.checkpoint) if args.checkpoint else ensure_demo(print).model
    found = asyncio.run(measure(model, args.num_requests, args.overload))
    print(f"peak {found.peak:.0f} tokens/s with {IN_LOOP} requests in a closed loop")
    share = f"{found.above / found.peak:.0%}"
    print(f"at {args.overload:g} times that rate {found.above:.0f} tokens/s, {share} of it")
    print(f"({found.num_refused} of {found.num_requests} refused)")
    write_facts(args.out, overload=args.overload, tokens_per_second=found)


if __name__ == "__main__":
    main()
