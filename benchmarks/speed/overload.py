"""python -m benchmarks.speed.overload: goodput under overload.

Client and server share the machine. A closed loop that keeps as many requests running as may run
gives the peak. Then twice as many requests a second come as were answered then, whether or not they
are answered; a bounded queue refuses the rest. Both take turns, since a shared machine's memory
changes its speed: each open loop is held against the mean of the closed ones before and after it.
Goodput is tokens of complete answers a second over the last three quarters of the time in which
requests are sent: before and after that, fewer requests run. Tokens count when they come, not when
their answer ends: equal requests of a closed loop end sixteen at a time, so that one wave more or
less would decide.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from pathlib import Path
from statistics import mean, median

from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from lora_serve.bench.client import Endpoint, RequestRecord
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import run_load
from lora_serve.bench.server import lora_serve_command, running_server
from lora_serve.bench.workload import TimedRequest, WorkloadSpec, make_workload
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import free_port

MAX_NUM_SEQS = 16
IN_LOOP = 2 * MAX_NUM_SEQS
SHAPE = {"input_tokens": 64, "output_tokens": 64, "vocab_size": 300}


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete one. arrivals: when something of it came, in seconds, in order."""

    arrivals: tuple[float, ...]
    tokens: int

    def tokens_between(self, since: float, until: float) -> float:
        come = sum(since < at <= until for at in self.arrivals)
        return self.tokens * come / len(self.arrivals)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Tokens a second: of the closed loops, and of the open ones between each two of them."""

    closed: tuple[float, ...]
    above: tuple[float, ...]
    num_requests: int
    num_refused: int

    def shares(self) -> list[float]:
        """The share of the peak around it that each open loop reached."""
        around = zip(self.closed, self.closed[1:], strict=False)
        return [above / mean(pair) for above, pair in zip(self.above, around, strict=True)]


async def measure(model: Path, num_requests: int, overload: float, turns: int) -> Goodput:
    port = free_port()
    flags = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-queued-reqs", str(MAX_NUM_SEQS))
    command = lora_serve_command(str(model), port, flags)
    log = Path(tempfile.mkdtemp(prefix="overload-")) / "server.log"
    url = f"http://127.0.0.1:{port}"
    endpoint = Endpoint(Origin.parse(url), str(model))
    async with running_server(command, url, log):
        warmup = make_workload(WorkloadSpec(seed=0, num_requests=2 * MAX_NUM_SEQS, **SHAPE))
        await run_load(endpoint, warmup, MAX_NUM_SEQS)
        closed = [await closed_loop(endpoint, num_requests, seed=1)]
        above: list[float] = []
        num_answered = 0
        for turn in range(1, turns + 1):
            rate = overload * closed[-1] / SHAPE["output_tokens"]
            spec = WorkloadSpec(
                seed=2 * turn, num_requests=int(overload * num_requests), request_rate=rate, **SHAPE
            )
            arrivals = make_workload(spec)
            ended = await answers(endpoint, arrivals)
            above.append(goodput(ended, until=arrivals[-1].at_seconds))
            num_answered += len(ended)
            closed.append(await closed_loop(endpoint, num_requests, seed=2 * turn + 1))
    sent = turns * int(overload * num_requests)
    return Goodput(tuple(closed), tuple(above), sent, sent - num_answered)


async def closed_loop(endpoint: Endpoint, num_requests: int, seed: int) -> float:
    """Its goodput."""
    workload = make_workload(WorkloadSpec(seed=seed, num_requests=num_requests, **SHAPE))
    ended = await answers(endpoint, workload, IN_LOOP)
    assert len(ended) == num_requests, "the peak must be without errors"
    return goodput(ended, until=ended[-IN_LOOP - 1].arrivals[-1])


async def answers(
    endpoint: Endpoint, workload: Sequence[TimedRequest], max_concurrency: int | None = None
) -> list[Answer]:
    """The complete ones, as they ended."""
    ended: list[Answer] = []
    start = time.perf_counter()

    def note(record: RequestRecord) -> None:
        now = time.perf_counter() - start
        if record.error is None:
            arrivals = accumulate(reversed(record.gaps_seconds), sub, initial=now)
            ended.append(Answer(tuple(reversed(list(arrivals))), record.output_tokens))

    await run_load(endpoint, workload, max_concurrency, note)
    return ended


def goodput(ended: Sequence[Answer], until: float) -> float:
    since = until / 4
    return sum(answer.tokens_between(since, until) for answer in ended) / (until - since)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, help="of 0.5B, made if it is not there; else the demo's model"
    )
    parser.add_argument("--num-requests", type=int, default=160, help="of each closed loop")
    parser.add_argument("--overload", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    model = ensure_checkpoint(args.checkpoint) if args.checkpoint else ensure_demo(print).model
    found = asyncio.run(measure(model, args.num_requests, args.overload, args.turns))
    shares = found.shares()
    print(f"closed loops of {IN_LOOP} requests: {tokens_per_second(found.closed)}")
    print(f"at {args.overload:g} times their rate: {tokens_per_second(found.above)}")
    each = ", ".join(f"{share:.1%}" for share in shares)
    print(f"{median(shares):.1%} of the peak around it, in the median ({each})")
    print(f"({found.num_refused} of {found.num_requests} refused)")
    write_facts(
        args.out, overload=args.overload, tokens_per_second=found, shares_of_the_peak=shares
    )


def tokens_per_second(values: Sequence[float]) -> str:
    return f"{median(values):.0f} tokens/s in the median of {len(values)}"


if __name__ == "__main__":
    main()
