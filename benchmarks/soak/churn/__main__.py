"""python -m benchmarks.soak.churn: names, loads and memory while adapters come and go."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from benchmarks.common.facts import write_json
from benchmarks.soak.churn.fleet import Fleet, Member
from benchmarks.soak.churn.names import NameCosts, name_costs
from benchmarks.soak.churn.server import Server, random_prompt
from benchmarks.soak.churn.under_traffic import Churned, Memory, churn, memory_of
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.machine import Machine, describe_machine
from lora_serve.bench.summary import Spread
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import ServerProcess
from lora_serve.observability.table import text_table

FORMAT = "lora-serve/churn/1"
NUM_VERSIONS = 256
NUM_TIMED = 40  # loads of each kind, on an idle server
NUM_COMPARED = 40
FLAGS = ("--enable-lora", "--max-loras", "8", "--max-cpu-loras", "64", "--max-num-seqs", "16",
         "--served-model-name", "base", "--num-gpu-blocks-override", "2000")  # fmt: skip
COLD_FLAGS = (*FLAGS, "--no-enable-prefix-caching")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """An idle server with so many names. Milliseconds; a load is timed to its first answer."""

    num_names: int
    lookup: Spread
    in_place: Spread
    in_place_answer: Spread
    new_name: Spread
    new_name_answer: Spread
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    machine: Machine
    names: list[NameCosts]
    registered: list[Registered]
    seconds: float
    changes_per_minute: float
    outcomes: dict[str, int]
    in_place: Spread
    in_place_answer: Spread
    new_name: Spread
    new_name_answer: Spread
    num_changes: int
    memory_before: Memory
    memory: list[Memory]
    memory_after: Memory
    num_compared: int
    num_different: int


class Bench:
    def __init__(self, directory: Path, sizes: Sequence[int]) -> None:
        self._directory = directory
        self._sizes = sorted(sizes)
        self._model = ensure_demo(print).model
        self._rng = Random(1)

    async def run(self, seconds: float, changes_per_minute: float) -> Result:
        machine = describe_machine()
        names = [name_costs(size) for size in self._sizes]
        fleet = Fleet(self._directory, 0, NUM_VERSIONS)
        with ServerProcess(self._model, FLAGS, self._directory / "server.log") as process:
            await asyncio.to_thread(process.wait_until_healthy)
            server = Server(Origin.parse(process.base_url))
            registered = [
                await self._with_names(server, fleet, size, process.pid) for size in self._sizes
            ]
            before = memory_of(process.pid, 0.0)
            churned = await churn(server, fleet, process.pid, seconds=seconds,
                                  changes_per_minute=changes_per_minute)  # fmt: skip
            after = memory_of(process.pid, seconds)
            prompt = random_prompt(self._rng)
            compared = self._rng.sample(fleet.members, min(NUM_COMPARED, len(fleet.members)))
            answers = [await server.ask(member, prompt, 16) for member in compared]
        num_different = await self._num_different(compared, prompt, answers)
        return _result(machine, names, registered, churned, seconds, changes_per_minute,
                       (before, after), (len(compared), num_different))  # fmt: skip

    async def _with_names(
        self, server: Server, fleet: Fleet, num_names: int, pid: int
    ) -> Registered:
        new = []
        while len(fleet.members) < num_names:
            member = fleet.new_member()
            fleet.members.append(member)
            if len(fleet.members) <= num_names - NUM_TIMED:
                await server.load(member)
            else:
                new.append(await server.load_and_ask(member, random_prompt(self._rng)))
        in_place = []
        for _ in range(NUM_TIMED):
            member = self._rng.choice(fleet.members)
            fleet.renew(member)
            in_place.append(await server.load_and_ask(member, random_prompt(self._rng)))
        last = fleet.members[-1]
        lookups = [await server.timed(last, random_prompt(self._rng)) for _ in range(NUM_TIMED)]
        return Registered(
            num_names=num_names,
            lookup=spread(lookups),
            in_place=spread([one.load_seconds for one in in_place]),
            in_place_answer=spread([one.answer_seconds for one in in_place]),
            new_name=spread([one.load_seconds for one in new]),
            new_name_answer=spread([one.answer_seconds for one in new]),
            memory=memory_of(pid, 0.0),
        )

    async def _num_different(
        self, members: Sequence[Member], prompt: list[int], answers: Sequence[str]
    ) -> int:
        """How many answers are not, to the bit, those of a cold server that has read the files."""
        with ServerProcess(self._model, COLD_FLAGS, self._directory / "cold.log") as process:
            await asyncio.to_thread(process.wait_until_healthy)
            server = Server(Origin.parse(process.base_url))
            cold = []
            for member in members:
                await server.load(member)
                cold.append(await server.ask(member, prompt, 16))
        return sum(one != other for one, other in zip(cold, answers, strict=True))


def _result(
    machine: Machine,
    names: list[NameCosts],
    registered: list[Registered],
    churned: Churned,
    seconds: float,
    changes_per_minute: float,
    memory: tuple[Memory, Memory],
    compared: tuple[int, int],
) -> Result:
    return Result(
        machine=machine, names=names, registered=registered, seconds=seconds,
        changes_per_minute=changes_per_minute, outcomes=dict(churned.outcomes),
        in_place=spread([one.load_seconds for one in churned.in_place]),
        in_place_answer=spread([one.answer_seconds for one in churned.in_place]),
        new_name=spread([one.load_seconds for one in churned.new_names]),
        new_name_answer=spread([one.answer_seconds for one in churned.new_names]),
        num_changes=len(churned.in_place) + len(churned.new_names),
        memory_before=memory[0], memory=churned.memory, memory_after=memory[1],
        num_compared=compared[0], num_different=compared[1],
    )  # fmt: skip


def spread(seconds: Sequence[float]) -> Spread:
    found = Spread.of_seconds(seconds)
    assert found is not None, "nothing was timed"
    return found


def text(result: Result) -> str:
    names = [(f"{one.num_names:,}", f"{one.lookup_us:.2f}", f"{one.publish_us:.2f}")
             for one in result.names]  # fmt: skip
    loads = [
        (f"{one.num_names:,} names, {what}", *(f"{value:.1f}" for value in (s.p50, s.p90, s.p99)))
        for one in result.registered
        for what, s in (
            ("one answer", one.lookup), ("in place", one.in_place_answer),
            ("new name", one.new_name_answer),
        )
    ] + [
        (f"under traffic, {what}", *(f"{value:.1f}" for value in (s.p50, s.p90, s.p99)))
        for what, s in (("in place", result.in_place_answer), ("new name", result.new_name_answer))
    ]  # fmt: skip
    moments = [
        *((f"{one.num_names:,} names registered", one.memory) for one in result.registered),
        *((f"churn, {one.seconds:.0f} s", one) for one in result.memory[:: _every(result)]),
        ("after it", result.memory_after),
    ]
    memory = [
        (when, f"{one.api_bytes / 2**20:.0f}", f"{one.engine_bytes / 2**20:.0f}")
        for when, one in moments
    ]
    return "\n\n".join((
        text_table(("names", "look up, us", "publish, us"), names),
        text_table(("ms, load to first right answer", "p50", "p90", "p99"), loads),
        text_table(("memory, MiB", "API", "engine"), memory),
        f"{result.num_changes:,} changes in {result.seconds:.0f} s; {result.outcomes}",
        f"{result.num_different} of {result.num_compared} answers differ from a cold server's",
    ))  # fmt: skip


def _every(result: Result) -> int:
    """So that about eight moments are shown."""
    return max(1, len(result.memory) // 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--changes-per-minute", type=float, default=600.0)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/churn.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="churn-") as directory:
        bench = Bench(Path(directory), args.names)
        result = asyncio.run(bench.run(args.seconds, args.changes_per_minute))
    document = {"format": FORMAT, **msgspec.to_builtins(result)}
    write_json(args.results, document)
    print(text(result))
    sys.exit(bool(result.num_different))


if __name__ == "__main__":
    main()
