"""python -m benchmarks.soak: an hour of mixed traffic and faults; exit code 1 if a check fails."""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from benchmarks.common.checks import Check, report
from benchmarks.common.facts import thinned, write_json
from benchmarks.common.processes import server_cpu_seconds
from benchmarks.soak.asking import ask
from benchmarks.soak.cold_answers import MODEL_NAME, ColdAnswers, ask_cold
from benchmarks.soak.faults import Faults, bound_redis
from benchmarks.soak.health import HealthProbe, note_refusals, permille_999
from benchmarks.soak.journal import Journal
from benchmarks.soak.plot import plot_soak
from benchmarks.soak.questions import large_question, make_questions
from benchmarks.soak.samples import PERIOD_SECONDS, Sample, Sampler
from benchmarks.soak.tenants import Landlord
from benchmarks.soak.traffic import Traffic
from benchmarks.soak.verdict import Record, checks
from benchmarks.soak.versions import Version, write_versions
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.machine import Machine, describe_machine
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.server_process import ServerProcess
from tests.fakes.redis_server import EXECUTABLES, RedisServer

FORMAT = "lora-serve/soak/1"
NUM_WRITTEN = 100  # samples of those taken
RAM_BYTES, DISK_BYTES = 3_000_000, 16_000_000
NUM_TENANTS = 12
IDLE_SECONDS = 120.0  # by when everything must have ended
FLAGS = (
    *("--served-model-name", MODEL_NAME, "--enable-prompt-embeds", "--cpu-threads", "1"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-model-len", "1024"),
    *("--num-gpu-blocks-override", "90", "--max-num-queued-reqs", "48"),
    *("--enable-lora", "--max-loras", "3", "--max-cpu-loras", "5"),
    *("--max-stream-backlog", "64", "--step-timeout", "600", "--drain-timeout", "5"),
    *("--kv-ram-bytes", str(RAM_BYTES), "--kv-disk-bytes", str(DISK_BYTES)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    seconds: float
    seed: int
    num_clients: int
    num_questions: int
    pause_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What is written. cpu_cores: how many cores the server used on average.

    health_p999_ms: the 99.9th percentile of how long /health took.
    """

    machine: Machine
    plan: Plan
    flags: tuple[str, ...]
    checks: list[Check]
    counts: dict[str, int]
    totals: dict[str, float]
    num_tokens: int
    num_cached_tokens: int
    cpu_cores: float
    health_p999_ms: float
    incidents: list[str]
    events: list[object]
    samples: list[Sample]


class Soak:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan = plan
        self._directory = directory
        self._demo = ensure_demo(print)
        self._questions = make_questions(plan.seed, plan.num_questions, Recipe().hidden_size)

    async def run(self) -> Result:
        machine = describe_machine()
        print(f"asking {self._plan.num_questions} questions of a cold server", flush=True)
        versions = write_versions(self._demo, made(self._directory / "versions"))
        answers, known = await ask_cold(
            self._demo, versions, self._questions, self._directory / "cold.log"
        )
        redis = RedisServer(redis_executable(), made(self._directory / "redis"))
        redis.start()
        try:
            bound_redis(redis)
            kv = self._directory / "kv"
            flags = (*FLAGS, "--kv-disk-path", str(kv), "--kv-redis-url", redis.url)
            with ServerProcess(self._demo.model, flags, self._directory / "server.log") as server:
                await asyncio.to_thread(server.wait_until_healthy)
                return await self._run_on(server, redis, answers, known, kv, machine)
        finally:
            redis.stop()

    async def _run_on(
        self,
        server: ServerProcess,
        redis: RedisServer,
        answers: ColdAnswers,
        known: list[Version],
        kv: Path,
        machine: Machine,
    ) -> Result:
        origin = Origin.parse(server.base_url)
        journal = Journal(answers)
        adapters = made(self._directory / "tenants")
        landlord = Landlord(origin, [one for one in known if one.path], adapters, NUM_TENANTS)
        for tenant in landlord.tenants:
            await landlord.load(tenant, Random(tenant.name))
        traffic = Traffic(origin, self._questions, landlord.tenants, journal,
                          self._plan.pause_seconds)  # fmt: skip
        sampler = Sampler(origin, server.pid, kv, journal)
        large = await ask(origin, large_question(Recipe().hidden_size), MODEL_NAME)
        assert large.status == 200, large.message
        await traffic.crowd("warm", 60, equal=False)
        idle_before = await idle(sampler)
        faults = Faults(server, origin, redis, landlord, traffic, journal)
        num_warm = len(sampler.samples)
        gc.collect()
        gc.freeze()  # else full collections walk over all cold answers while clients wait
        with HealthProbe(origin, self._directory / "health") as probe:
            used = await self._traffic_for_a_while(faults, traffic, sampler, server)
        probes = probe.probes()
        note_refusals(probes, journal)
        health_p999 = permille_999([each.end - each.begin for each in probes])
        during = sampler.samples[num_warm:]
        idle_after = await idle(sampler)
        record = Record(
            counts=journal.counts, totals=sampler.totals.values, samples=during,
            idle_before=idle_before, idle_after=idle_after, num_kills=len(journal.outages),
            num_loads=landlord.num_loads, disk_bound=DISK_BYTES,
            health_p999_seconds=health_p999, num_health_checks=len(probes),
        )  # fmt: skip
        return Result(
            machine=machine, plan=self._plan, flags=FLAGS, checks=checks(record),
            counts=dict(journal.counts), totals=sampler.totals.values,
            num_tokens=journal.num_tokens, num_cached_tokens=journal.num_cached_tokens,
            cpu_cores=round(used / self._plan.seconds, 2),
            health_p999_ms=round(1e3 * health_p999, 1), incidents=journal.incidents,
            events=list(journal.events), samples=[*during, idle_after],
        )  # fmt: skip

    async def _traffic_for_a_while(
        self, faults: Faults, traffic: Traffic, sampler: Sampler, server: ServerProcess
    ) -> float:
        """Returns the processor seconds that the server has used since its last engine's start."""
        plan = self._plan
        before = server_cpu_seconds(server.pid)
        async with asyncio.TaskGroup() as endless:
            clients = [
                endless.create_task(traffic.client(f"{plan.seed} client {number}"))
                for number in range(plan.num_clients)
            ]
            watcher = endless.create_task(sampler.run())
            printer = endless.create_task(self._tell(faults.journal, sampler))
            async with asyncio.TaskGroup() as finite:
                for number, fault in enumerate(faults.plan()):
                    seed = f"{plan.seed} fault {number}"
                    finite.create_task(faults.repeat(fault, plan.seconds, seed))
                finite.create_task(asyncio.sleep(plan.seconds))
            for task in (*clients, watcher, printer):
                task.cancel()
        return server_cpu_seconds(server.pid) - before

    async def _tell(self, journal: Journal, sampler: Sampler) -> None:
        """A line a minute, until it is cancelled."""
        while True:
            await asyncio.sleep(60)
            last = sampler.samples[-1]
            memory = f"{last.api.rss_bytes >> 20} + {last.engine.rss_bytes >> 20} MiB"
            print(f"{last.seconds / 60:.1f} min: {dict(journal.counts)}, {memory}", flush=True)


async def idle(sampler: Sampler) -> Sample:
    """The first sample in which nothing runs and all is given back, or the last one in time."""
    for _ in range(int(IDLE_SECONDS / PERIOD_SECONDS)):
        sample = await sampler.take()
        if not (sample.num_running or sample.num_waiting or sample.used_blocks):
            return sample
    return sample


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def redis_executable() -> str:
    found = next((path for name in EXECUTABLES if (path := shutil.which(name))), None)
    if found is None:
        sys.exit("benchmarks.soak needs a redis-server or valkey-server; install one")
    return found


def write(result: Result, results: Path, plot: Path) -> None:
    """The picture shows every sample, the file some of them."""
    document = {"format": FORMAT, **msgspec.to_builtins(result)}
    write_json(results, {**document, "samples": thinned(result.samples, NUM_WRITTEN)})
    plot_soak(result.samples, result.events, plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--pause", type=float, default=0.8, help="seconds of a client's pause")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/soak.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/soak.png"))
    args = parser.parse_args()
    plan = Plan(60 * args.minutes, args.seed, args.clients, args.questions, args.pause)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server outlives its soak
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        result = asyncio.run(Soak(plan, Path(directory)).run())
    write(result, args.results, args.plot)
    report(result.checks, result.incidents)


if __name__ == "__main__":
    main()
