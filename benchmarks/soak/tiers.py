"""python -m benchmarks.soak.tiers: two servers share a disk path far too small for their KV.

No device cache: every prompt's KV comes from the disk or is computed. Clients ask a table of
questions of three models under many salts, each answer compared, to the bit, with that of a cold
server. Meanwhile engines are killed and adapters' KV is dropped. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.common.checks import Check, level, report
from benchmarks.common.facts import thinned, write_json
from benchmarks.common.processes import Footprint, engine_pid, footprint
from benchmarks.soak.asking import ask
from benchmarks.soak.cold_answers import MODEL_NAME, ColdAnswers, ask_cold, post
from benchmarks.soak.questions import Question, make_questions
from benchmarks.soak.samples import Totals, bytes_below, read_metrics
from lora_serve.bench.http_stream import HttpFault, Origin
from lora_serve.bench.machine import describe_machine
from lora_serve.demo.model import DemoPaths, ensure_demo
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.server_process import ServerProcess

NUM_SERVERS = 2
PERIOD_SECONDS = 1.0
NUM_WRITTEN = 100  # looks of those taken
KILLING_SHARE = 0.25  # of the time; then engines live on, so that their memory can be compared
FLAGS = (
    *("--served-model-name", MODEL_NAME, "--enable-prompt-embeds", "--cpu-threads", "1"),
    *("--no-enable-prefix-caching", "--max-num-seqs", "8", "--max-model-len", "1024"),
    *("--num-gpu-blocks-override", "400", "--enable-lora", "--max-loras", "2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """num_clients: of each server. disk_bytes: the bound."""

    seconds: float
    seed: int
    num_clients: int
    num_questions: int
    num_salts: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Look:
    """A moment: of each server's engine, and of the directory."""

    engines: list[Footprint]
    num_files: int
    num_bytes: int


@dataclass(slots=True)
class Diary:
    """What happened. stories: of what should not have, some of them."""

    counts: Counter[str] = field(default_factory=Counter)
    looks: list[Look] = field(default_factory=list)
    totals: list[Totals] = field(default_factory=lambda: [Totals() for _ in range(NUM_SERVERS)])
    stories: list[str] = field(default_factory=list)
    num_prompt_tokens_found: int = 0

    def blame(self, what: str, story: str) -> None:
        self.counts[what] += 1
        if len(self.stories) < 50:
            self.stories.append(f"{what}: {story}")

    def total(self, name: str) -> float:
        return sum(totals.values.get(name, 0.0) for totals in self.totals)


@dataclass(slots=True)
class TierSoak:
    plan: Plan
    demo: DemoPaths
    questions: Sequence[Question]
    answers: ColdAnswers
    path: Path
    servers: Sequence[ServerProcess]
    models: Sequence[str]
    diary: Diary = field(default_factory=Diary)

    async def run(self) -> None:
        end = time.monotonic() + self.plan.seconds
        tasks = [
            asyncio.create_task(work)
            for number, server in enumerate(self.servers)
            for work in (
                *(
                    self._client(server, Random(f"{self.plan.seed} {number} {client}"))
                    for client in range(self.plan.num_clients)
                ),
                self._kill(server, Random(f"{self.plan.seed} kill {number}"), end),
                self._drop(server, Random(f"{self.plan.seed} drop {number}")),
            )
        ]
        while time.monotonic() < end:
            await asyncio.sleep(PERIOD_SECONDS)
            await self._look()
            for task in tasks:
                if task.done():
                    task.result()  # a bug of this script: it would be missed
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, server: ServerProcess, rng: Random) -> None:
        origin = Origin.parse(server.base_url)
        while True:
            question = rng.choice(self.questions)
            salt = f"salt {rng.randrange(self.plan.num_salts)}"
            heard = await ask(origin, question, rng.choice(self.models), cache_salt=salt)
            fault = self.answers.fault_of(question, heard, is_part=heard.status != 200)
            if fault is not None:
                self.diary.blame("wrong", f"question {question.index}: {fault}")
            elif heard.status == 200:
                self.diary.counts["answered"] += 1
                self.diary.num_prompt_tokens_found += heard.num_cached_tokens
            elif heard.status == 503:
                self.diary.counts["engine down"] += 1
                await asyncio.sleep(0.5)
            else:
                self.diary.blame("unexpected", f"{heard.status} {heard.message}")

    async def _kill(self, server: ServerProcess, rng: Random, end: float) -> None:
        every = min(60.0, self.plan.seconds / 10)
        last = end - self.plan.seconds * (1 - KILLING_SHARE)
        while (pause := every * rng.uniform(0.5, 1.5)) + time.monotonic() < last:
            await asyncio.sleep(pause)
            pid = engine_pid(server.pid)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.diary.counts["killed"] += 1
        await asyncio.Event().wait()

    async def _drop(self, server: ServerProcess, rng: Random) -> None:
        while True:
            await asyncio.sleep(30 * rng.uniform(0.5, 1.5))
            body: dict[str, object] = {"lora_name": rng.choice(self.models[1:])}
            try:
                status, text = await post(
                    Origin.parse(server.base_url), "/reset_prefix_cache", body
                )
            except (OSError, HttpFault) as error:
                status, text = 503, repr(error)
            if status not in (200, 503):
                self.diary.blame("unexpected", f"reset: {status} {text}")
            self.diary.counts["dropped" if status == 200 else "engine down"] += 1

    async def _look(self) -> None:
        for server, totals in zip(self.servers, self.diary.totals, strict=True):
            totals.add(await read_metrics(Origin.parse(server.base_url)))
        pids = [engine_pid(server.pid) for server in self.servers]
        engines = [found for pid in pids if pid and (found := footprint(pid)) is not None]
        names = [name for _, _, names in os.walk(self.path) for name in names]
        self.diary.looks.append(Look(engines, len(names), await asyncio.to_thread(self._bytes)))

    def _bytes(self) -> int:
        """Bytes on the disk; what moves meanwhile is missed rather than counted twice."""
        places = ("trash", "quarantine", "namespaces", "staging")
        return sum(bytes_below(self.path / place) for place in places)


def checks(plan: Plan, diary: Diary, working_set: int, left: Mapping[str, int]) -> list[Check]:
    """left: what lay in the directory when both servers had ended, by what it is."""
    counts, looks = diary.counts, diary.looks
    most = max(look.num_bytes for look in looks)
    saved = diary.total("lora_serve:kv_tier_saved_bytes_total{disk}")
    refused = diary.total("lora_serve:kv_tier_quarantined_files_total{disk}")
    found = [
        Check("no wrong answer", not counts["wrong"],
              f"{counts['wrong']} of {counts['answered']:,}"),
        Check("no unexpected error", not counts["unexpected"], f"{counts['unexpected']}"),
        Check("the disk keeps its bound", most <= plan.disk_bytes,
              f"at most {most / 1e6:.2f} of {plan.disk_bytes / 1e6:.2f} MB"),
        Check("no file was refused", not refused, f"{refused:g}"),
        Check("nothing is left behind", not left["staged"] and not left["trash"],
              f"{left['staged']} staged, {left['trash']} dropped"),
        Check("all that is left can be read", not left["unreadable"],
              f"{left['groups']} files, {left['unreadable']} refused by `kv verify`"),
        _level("files", [look.num_files for look in looks], slack=20),
        _level("descriptors of engines",
               [sum(one.num_descriptors for one in look.engines) for look in looks], slack=8),
        _level("memory of engines, MiB",
               [sum(one.rss_bytes for one in look.engines) >> 20 for look in looks]),
    ]  # fmt: skip
    met = {
        "the working set, in bounds": working_set / plan.disk_bytes,
        "stored, in bounds": saved / plan.disk_bytes,
        "blocks evicted": diary.total("lora_serve:kv_tier_evicted_blocks_total{disk}"),
        "blocks from the disk": diary.total("lora_serve:kv_tier_hit_blocks_total{disk}"),
        "engines killed": counts["killed"],
        "adapters' KV dropped": counts["dropped"],
    }
    return found + [Check(f"met: {what}", n >= 1, f"{n:,.0f}") for what, n in met.items()]


def _level(what: str, values: Sequence[int], slack: int = 0) -> Check:
    """Compares the third quarter with the last: no engine is killed in either."""
    quarter = len(values) // 4
    third, last = values[2 * quarter : 3 * quarter], values[-quarter:]
    return level(f"{what} keep their level", third, last, slack)


def what_is_left(path: Path) -> dict[str, int]:
    verify = (sys.executable, "-m", "lora_serve.cli.main", "kv", "verify", str(path))
    is_whole = subprocess.run(verify, capture_output=True, check=False).returncode == 0
    return {
        "staged": sum(entry.is_dir() for entry in (path / "staging").iterdir()),
        "trash": sum(1 for _ in (path / "trash").glob("*")),
        "groups": sum(1 for _ in path.glob("namespaces/*/*.kv")),
        "unreadable": int(not is_whole),
    }


def serve(demo: DemoPaths, path: Path, disk_bytes: int, log: Path) -> ServerProcess:
    modules = (f"{adapter.name}={adapter}" for adapter in (demo.alpha, demo.beta))
    tier = ("--kv-disk-path", str(path), "--kv-disk-bytes", str(disk_bytes))
    return ServerProcess(demo.model, (*FLAGS, "--lora-modules", *modules, *tier), log)


async def bytes_of_one_turn(demo: DemoPaths, questions: Sequence[Question], work: Path) -> int:
    """What the KV of all questions takes, of one model under one salt."""
    path = work / "unbounded"
    with serve(demo, path, 2**34, work / "unbounded.log") as server:
        server.wait_until_healthy()
        for question in questions:
            await ask(Origin.parse(server.base_url), question, MODEL_NAME)
        await asyncio.to_thread(server.stop)
    return bytes_below(path / "namespaces")


async def soak(plan: Plan, work: Path) -> tuple[list[Check], Diary]:
    demo = ensure_demo(print)
    questions = make_questions(plan.seed, plan.num_questions, Recipe().hidden_size)
    adapters = (demo.alpha, demo.beta)
    answers, _ = await ask_cold(demo, adapters, questions, work / "cold.log")
    models = (MODEL_NAME, *(adapter.name for adapter in adapters))
    turn = await bytes_of_one_turn(demo, questions, work)
    path = work / "kv"
    servers = [
        serve(demo, path, plan.disk_bytes, work / f"{number}.log") for number in range(NUM_SERVERS)
    ]
    with servers[0], servers[1]:
        for server in servers:
            await asyncio.to_thread(server.wait_until_healthy)
        running = TierSoak(plan, demo, questions, answers, path, servers, models)
        await running.run()
        for server in servers:
            await asyncio.to_thread(server.stop)
    working_set = turn * len(models) * plan.num_salts
    return checks(plan, running.diary, working_set, what_is_left(path)), running.diary


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3, help="Of each server.")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--salts", type=int, default=8)
    parser.add_argument("--disk-bytes", type=int, default=12_000_000, help="The bound.")
    parser.add_argument("--out", type=Path, help="Where to write the JSON.")
    args = parser.parse_args()
    plan = Plan(
        seconds=60 * args.minutes, seed=args.seed, num_clients=args.clients,
        num_questions=args.questions, num_salts=args.salts, disk_bytes=args.disk_bytes,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server outlives its soak
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="tier-soak-") as directory:
        found, diary = asyncio.run(soak(plan, Path(directory)))
    if args.out:
        facts = {"machine": machine, "plan": plan, "flags": FLAGS, "checks": found,
                 "counts": diary.counts, "looks": thinned(diary.looks, NUM_WRITTEN)}  # fmt: skip
        write_json(args.out, facts)
    report(found, diary.stories)


if __name__ == "__main__":
    main()
