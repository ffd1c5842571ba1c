"""What dividing a model among ranks costs: N ranks of 1 thread against 1 rank of N threads.

`python -m benchmarks.speed.tensor_parallel`, on a quiet machine of as many cores. Both execute the
same steps in turns, so that a neighbour slows both or neither: prompts, decodes and loads of an
adapter, at the shape of Qwen2.5-0.5B; `--reduce gather segments all-reduce` has each way of ranks
take its turn. `--bound` adds shares that are computed side by side and exchange nothing: what comes
out is wrong, and no exchange can be faster. Memory is that of processes which have loaded a share;
`--memory-only` asks for that alone. `--shape 3B` has the shape of Qwen2.5-3B, and `--made-up` has
weights that each process makes up while it loads, tensor by tensor, so that nothing large is
written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from benchmarks.gpu.shapes import SHAPES, write_config
from benchmarks.speed.shares_apart import SharesApart
from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from lora_serve.config.model import AUTO, RANDOM_WEIGHTS
from lora_serve.config.parallel import GATHER
from lora_serve.engine.core.executor import Executor, make_executor
from lora_serve.identity import BASE_MODEL
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import AskedOutputs, SampleInput, ScheduledRequest, SchedulerOutput
from lora_serve.worker.largest_steps import largest_adapter

BLOCK_SIZE = 16
CONTEXT = 512
PREFILL_TOKENS = 1024
MOST_REQUESTS = 8
BLOCKS_OF_REQUEST = PREFILL_TOKENS // BLOCK_SIZE + 1
DRAWN = SamplingParams(temperature=0.8)  # screening of greedy tokens is a matter of its own
RANK = 16
NOTHING = "nothing is exchanged"
ONE = "one rank"
_KIB = 1024


@dataclass(frozen=True)
class Row:
    """Milliseconds, and how much of one rank's speed is kept. reduce: how ranks exchange."""

    what: str
    reduce: str
    one_rank: float
    ranks: float
    kept: float


@dataclass(frozen=True)
class Memory:
    """MiB that a process holds when it has loaded: its own, without what files back."""

    processes: str
    mib: list[float]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="and the threads of the other")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B", help="of Qwen2.5")
    parser.add_argument("--made-up", action="store_true", help="write no weights")
    parser.add_argument("--checkpoint", type=Path, help="where the model is, or is written")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--reduce", nargs="+", default=[GATHER], help="ways that take turns")
    parser.add_argument("--bound", action="store_true", help="also shares that exchange nothing")
    parser.add_argument("--memory-only", action="store_true", help="time nothing")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--load-only", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    model = args.checkpoint or Path(f"/tmp/lora-serve-{args.shape.lower()}")
    if args.made_up:
        model = write_config(args.shape, model.with_name(f"{model.name}-made-up"))
    else:
        ensure_checkpoint(model, SHAPES[args.shape])
    if args.load_only is not None:
        _tell_memory(_config(model, args, args.load_only))
        return
    memory = [_memory(argv or sys.argv[1:], size) for size in (1, args.ranks)]
    rows = [] if args.memory_only else _speed(model, args)
    print("| step | of ranks | 1 rank, ms | ranks, ms | speed kept |\n|---|---|--:|--:|--:|")
    for row in rows:
        times = f"{row.one_rank:.2f} | {row.ranks:.2f} | {row.kept:.1%}"
        print(f"| {row.what} | {row.reduce} | {times} |")
    for each in memory:
        print(f"{each.processes}: {', '.join(f'{mib:.0f} MiB' for mib in each.mib)}")
    write_facts(args.out, ranks=args.ranks, rows=rows, memory=memory)


def _config(model: Path, args: argparse.Namespace, size: int, reduce: str = GATHER) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(model),
            load_format=RANDOM_WEIGHTS if args.made_up else AUTO,
            dtype=args.dtype,
            cpu_threads=args.ranks // size,
            max_model_len=4096,
        ),
        cache=CacheConfig(num_gpu_blocks_override=MOST_REQUESTS * BLOCKS_OF_REQUEST),
        lora=LoRAConfig(enable_lora=True, max_loras=2),
        parallel=ParallelConfig(
            tensor_parallel_size=size,
            tensor_parallel_backend=args.backend,
            tensor_parallel_reduce=reduce,
        ),
        scheduler=SchedulerConfig(max_num_seqs=MOST_REQUESTS),
    )


# ── speed ───────────────────────────────────────────────────────────────────────────────────


def _speed(model: Path, args: argparse.Namespace) -> list[Row]:
    """Steps of all in turns, one rank's first; the first of each is not counted."""
    executors = {ONE: make_executor(_config(model, args, 1))}
    for way in args.reduce:
        executors[way] = make_executor(_config(model, args, args.ranks, way))
    info, *_ = [executor.load() for executor in executors.values()]
    apart = SharesApart(_config(model, args, args.ranks), args.ranks) if args.bound else None
    if apart is not None:
        apart.load()
    steps = {
        f"prompt of {PREFILL_TOKENS} tokens": _prompt(),
        "decode of 1": _decode(1),
        f"decode of {MOST_REQUESTS}": _decode(MOST_REQUESTS),
    }
    rows = []
    for what, requests in steps.items():
        step = SchedulerOutput(0, requests)
        works = {way: partial(_run, executor, step) for way, executor in executors.items()}
        if apart is not None:
            works[NOTHING] = partial(apart.run, step)
        rows += _turns(what, works, args.rounds)
    adapter = largest_adapter(info.lora_modules, RANK)
    loads = {way: partial(_load, executor, adapter) for way, executor in executors.items()}
    rows += _turns(f"load of an adapter of rank {RANK}", loads, args.rounds)
    for each in (*executors.values(), apart):
        if each is not None:
            each.close()
    return rows


def _turns(what: str, works: Mapping[str, Callable[[], object]], rounds: int) -> list[Row]:
    seconds: dict[str, list[float]] = {way: [] for way in works}
    for _ in range(rounds + 1):
        for way, work in works.items():
            begin = time.perf_counter()
            work()
            seconds[way].append(time.perf_counter() - begin)
    taken = {way: 1e3 * median(times[1:]) for way, times in seconds.items()}
    one = taken.pop(ONE)
    return [Row(what, way, one, ranks, one / ranks) for way, ranks in taken.items()]


def _run(executor: Executor, step: SchedulerOutput) -> None:
    executor.submit(step)
    executor.collect()


def _load(executor: Executor, adapter: AdapterCheckpoint) -> None:
    """Prepare it and have a step take it and drop it again."""
    executor.prepare_adapter(adapter)
    executor.submit(SchedulerOutput(0, (), (), (adapter.digest,)))
    executor.collect()
    executor.submit(SchedulerOutput(0, (), (adapter.digest,)))
    executor.collect()


def _prompt() -> tuple[ScheduledRequest, ...]:
    return (_request(0, 0, [7 * i % 5000 for i in range(PREFILL_TOKENS)]),)


def _decode(count: int) -> tuple[ScheduledRequest, ...]:
    return tuple(_request(i, CONTEXT, [i]) for i in range(count))


def _request(index: int, start: int, tokens: list[int]) -> ScheduledRequest:
    num_blocks = math.ceil((start + len(tokens)) / BLOCK_SIZE)
    first = index * BLOCKS_OF_REQUEST
    sample = SampleInput(DRAWN, seed=index, position=start + len(tokens))
    return ScheduledRequest(
        str(index),
        BASE_MODEL,
        start,
        tokens,
        [list(range(first, first + num_blocks))],
        AskedOutputs((sample,)),
    )


# ── memory ──────────────────────────────────────────────────────────────────────────────────


def _memory(argv: Sequence[str], size: int) -> Memory:
    command = (sys.executable, "-m", "benchmarks.speed.tensor_parallel", *argv)
    told = subprocess.run(
        (*command, "--load-only", str(size)), check=True, stdout=subprocess.PIPE, timeout=1800
    )
    return Memory(f"{size} of {size}", json.loads(told.stdout.splitlines()[-1]))


def _tell_memory(config: EngineConfig) -> None:
    """Load all ranks, and print what each process holds."""
    executor = make_executor(config)
    executor.load()
    me = os.getpid()
    others = [
        int(pid)
        for task in Path(f"/proc/{me}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    print(json.dumps([_own_mib(pid) for pid in (me, *others)]))
    executor.close()


def _own_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return round(int(fields["RssAnon"].split()[0]) / _KIB, 1)


if __name__ == "__main__":
    main()
