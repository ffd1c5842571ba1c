"""python -m benchmarks.soak.fleet: replicas, operators and kills, and every answer judged.

--replicas-by servers starts servers that share a catalog in a Redis or Valkey of its own, ray the
replicas of one `serve --replicas`. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import httpx

from benchmarks.common.checks import report
from benchmarks.common.facts import write_facts
from benchmarks.soak.__main__ import made, redis_executable
from benchmarks.soak.fleet.clients import Clients, Names, versions_at
from benchmarks.soak.fleet.history import Answer, Change
from benchmarks.soak.fleet.journal import NOT_TOLD, Journal
from benchmarks.soak.fleet.operators import Operators
from benchmarks.soak.fleet.replicas import (
    PATIENCE_SECONDS,
    Fault,
    RayReplicas,
    Replicas,
    Servers,
    Store,
    flags_of,
)
from benchmarks.soak.fleet.troubles import Troubles
from benchmarks.soak.fleet.verdict import Record, checks
from benchmarks.soak.fleet.versions import Version, Versions
from lora_serve.demo.model import ensure_demo
from tests.fakes.redis_server import RedisServer

KINDS: Mapping[str, Callable[[Path, int, Sequence[str], Path, Troubles], Replicas]] = {
    "servers": Servers,
    "ray": RayReplicas,
}
LOADED_AT_ONCE = 8
MID_ROLL_OUT_SECONDS = 0.4  # within which something is killed once a change was begun
TWO_AT_ONCE = 0.2  # of all faults


@dataclass(frozen=True, slots=True)
class Plan:
    replicas_by: str
    num_replicas: int
    num_adapters: int
    num_hot: int
    num_clients: int
    num_operators: int
    seconds: float
    seed: int
    pause_seconds: float
    fault_seconds: float


class Soak:
    """modules: what the --lora-modules of every replica load, once and never again."""

    def __init__(self, plan: Plan, replicas: Replicas, store: Store, troubles: Troubles,
                 names: Names, modules: Mapping[str, Version], versions: Versions,
                 http: httpx.AsyncClient) -> None:  # fmt: skip
        self._plan = plan
        self._replicas = replicas
        self._troubles = troubles
        self._http = http
        self._faults: Mapping[Fault, int] = {**replicas.faults, **store.faults}
        self._names = names
        self._modules = modules
        self._journal = journal = Journal()
        self._clients = Clients(replicas, names, journal, troubles, http)
        self._operators = Operators(replicas, names, versions, journal, troubles, http)

    async def run(self) -> Record:
        begin = time.monotonic()
        await self._replicas.start()
        for name, version in self._modules.items():
            change = Change(name, version.digest, begin, time.monotonic())
            self._journal.note_change(NOT_TOLD, change)
        await self._operators.load_all(LOADED_AT_ONCE)
        plan = self._plan
        print(f"{dict(self._journal.done)}: {plan.num_adapters} adapters are loaded", flush=True)
        async with asyncio.TaskGroup() as endless:
            clients = [
                endless.create_task(
                    self._clients.run(f"{plan.seed} client {i}", plan.pause_seconds)
                )
                for i in range(plan.num_clients)
            ]
            watch = endless.create_task(self._troubles.watch_machine())
            async with asyncio.TaskGroup() as finite:
                for i in range(plan.num_operators):
                    finite.create_task(self._operators.run(f"{plan.seed} operator {i}", 0.5))
                await self._do_faults(Random(f"{plan.seed} faults"))
                self._operators.end()
            for task in (*clients, watch):
                task.cancel()
        return Record(
            journal=self._journal,
            num_names=plan.num_adapters,
            num_kinds_of_faults=len(self._faults),
            faults=self._troubles.counts,
            finals=await self._agreed(),
        )

    async def _do_faults(self, rng: Random) -> None:
        end, dealt = time.monotonic() + self._plan.seconds, dealt_from(self._faults, rng)
        while time.monotonic() < end:
            await asyncio.sleep(rng.expovariate(1 / self._plan.fault_seconds))
            drawn = islice(dealt, 2 if rng.random() < TWO_AT_ONCE else 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._operators.change(rng))
                await asyncio.sleep(rng.uniform(0, MID_ROLL_OUT_SECONDS))
                for fault in dict.fromkeys(drawn):
                    group.create_task(fault(rng))
            print(f"{dict(self._journal.heard)}, {dict(self._journal.done)}, "
                  f"{dict(self._troubles.counts)}", flush=True)  # fmt: skip

    async def _agreed(self) -> list[Answer] | None:
        """What every replica comes to say of every name; None if they go on to differ."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        names = self._names.all
        urls = [*self._replicas.urls] * 2 * self._plan.num_replicas
        while time.monotonic() < deadline:
            told = [await versions_at(self._http, url, names) for url in urls]
            if all(each == told[0] for each in told):
                now = time.monotonic()
                return [Answer(name, told[0][name], now, now) for name in names]
            await asyncio.sleep(1)
        return None


def dealt_from(faults: Mapping[Fault, int], rng: Random) -> Iterator[Fault]:
    """Faults without end, each as often as its weight says, so that none is long in coming."""
    cards = [fault for fault, weight in faults.items() for _ in range(weight)]
    while True:
        rng.shuffle(cards)
        yield from cards


async def run(plan: Plan, directory: Path) -> Record:
    model = ensure_demo(print).model
    troubles = Troubles()
    redis = RedisServer(redis_executable(), made(directory / "redis"))
    redis.start()
    versions = Versions(model, made(directory / "versions"))
    names = Names(plan.num_adapters, plan.num_hot)
    modules = {name: versions.new() for name in names.hot}
    flags = flags_of(redis.url, modules)
    replicas = KINDS[plan.replicas_by](model, plan.num_replicas, flags, directory, troubles)
    # A connection that idles may be closed, by either side, while it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=limits) as http:
            store = Store(redis, replicas, troubles)
            soak = Soak(plan, replicas, store, troubles, names, modules, versions, http)
            return await soak.run()
    finally:
        replicas.stop()
        redis.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas-by", choices=KINDS, default="servers")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--hot", type=int, default=6, help="names that most changes are of")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--operators", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of a client's pause")
    parser.add_argument("--fault-every", type=float, default=3.0, help="seconds between faults")
    parser.add_argument("--logs", type=Path, help="a new directory, which stays with all logs")
    parser.add_argument("--results", type=Path, help="where to write the facts")
    args = parser.parse_args()
    plan = Plan(args.replicas_by, args.replicas, args.adapters, args.hot, args.clients,
                args.operators, 60 * args.minutes, args.seed, args.pause,
                args.fault_every)  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server outlives its soak
    with (
        contextlib.nullcontext(made(args.logs))
        if args.logs
        else tempfile.TemporaryDirectory(prefix="fleet-soak-") as directory
    ):
        record = asyncio.run(run(plan, Path(directory)))
    found, stories = checks(record), record.journal.stories
    write_facts(args.results, plan=plan, checks=found, heard=dict(record.journal.heard),
                changes=dict(record.journal.done), stories=stories)  # fmt: skip
    report(found, stories)


if __name__ == "__main__":
    main()
