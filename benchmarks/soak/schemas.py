"""python -m benchmarks.soak.schemas: a thousand schemas, each other than all before, in an hour.

Some are hostile or cannot be kept to, and must be refused. Meanwhile one client asks the same plain
question again and again, whose answer must stay what it was. Memory and processes must keep their
level once the cache of grammars is full. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.common.checks import Check, level, report
from benchmarks.common.facts import thinned, write_json
from benchmarks.common.processes import engine_pid, footprint, grammars_pid, num_processes
from benchmarks.soak.cold_answers import MODEL_NAME, post
from lora_serve.bench.http_stream import HttpFault, Origin
from lora_serve.bench.machine import describe_machine
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import ServerProcess

PERIOD_SECONDS = 1.0
NUM_WRITTEN = 100  # looks of those taken
MAX_TOKENS = 48
NUM_KEPT = 64  # grammars, by `GrammarSettings`
BAD_SHARE = 0.1  # of the schemas
MORE_MIB = 16  # that allocators may keep from one schema to the next
# API, engine, its resource tracker, grammars, the starter of trials, two trials and a fork of each
MOST_PROCESSES = 9
FLAGS = (
    *("--served-model-name", MODEL_NAME, "--cpu-threads", "1", "--max-num-seqs", "8"),
    *("--max-model-len", "512", "--num-gpu-blocks-override", "200"),
)
PLAIN = {"prompt": "The keeper reads every letter", "max_tokens": 8, "temperature": 0}
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Plan:
    num_schemas: int
    seconds: float
    seed: int
    num_clients: int


@dataclass(frozen=True, slots=True)
class Look:
    """A moment: MiB of each process, and how many there are. grammars: 0 while there is none."""

    api: int
    engine: int
    grammars: int
    num_processes: int
    num_asked: int


@dataclass(slots=True)
class Diary:
    """What happened. stories: of what should not have, some of them."""

    counts: Counter[str] = field(default_factory=Counter)
    looks: list[Look] = field(default_factory=list)
    grammar_pids: set[int] = field(default_factory=set)
    plain_texts: set[str] = field(default_factory=set)
    stories: list[str] = field(default_factory=list)

    def blame(self, what: str, story: str) -> None:
        self.counts[what] += 1
        if len(self.stories) < 50:
            self.stories.append(f"{what}: {story[:300]}")


def good_schema(number: int, rng: Random) -> Json:
    """An object whose first property no other schema has."""
    kinds: list[Json] = [
        {"type": "integer", "minimum": rng.randrange(100)},
        {"type": "string", "maxLength": rng.randrange(1, 60)},
        {"type": "string", "pattern": f"^[a-z]{{1,{rng.randrange(2, 30)}}}$"},
        {"enum": [f"value {rng.randrange(10**6)}" for _ in range(rng.randrange(1, 200))]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": rng.randrange(1, 50)},
        {"type": "object", "properties": {f"inner_{number}": {"type": "number"}}},
    ]
    properties = {f"field_{number}": rng.choice(kinds)}
    properties |= {f"more_{at}": rng.choice(kinds) for at in range(rng.randrange(12))}
    return {
        "type": "object",
        "properties": properties,
        "required": [f"field_{number}"],
        "additionalProperties": False,
    }


def bad_schema(number: int, rng: Random) -> Json:
    """One that is too large, cannot be kept to, or takes more than a constraint may."""
    deep: Json = {"type": "string", "pattern": f"^(.{{1,{900 + number % 90}}}){{1,900}}x{number}$"}
    return rng.choice(
        [
            {"enum": [f"{number} " + "x" * 66_000]},
            {"type": "object", "propertyNames": {"not": {"const": f"{number}"}}},
            {"type": "string", "pattern": f"(?=x){number}"},
            deep,
        ]
    )


def fault_of(schema: Json | None, status: int, text: str) -> str:
    """What is wrong with an answer, or "". schema: None for one that has to be refused."""
    if schema is None:
        return "" if status == 400 else f"{status} instead of 400: {text}"
    if status != 200:
        return f"{status}: {text}"
    choice = json.loads(text)["choices"][0]
    if choice["finish_reason"] == "length":
        return ""
    answer, properties = json.loads(choice["text"]), schema["properties"]
    assert isinstance(properties, dict), "schemas here are of objects"
    if not (set(properties) >= set(answer) and next(iter(properties)) in answer):
        return f"{choice['text']} does not match {schema}"
    return ""


class SchemaSoak:
    def __init__(self, plan: Plan, server: ServerProcess) -> None:
        self._plan, self._server = plan, server
        self._origin = Origin.parse(server.base_url)
        self._next = 0
        self._began = time.monotonic()
        self.diary = Diary()

    async def run(self) -> None:
        beside = [asyncio.create_task(self._look()), asyncio.create_task(self._ask_plainly())]
        clients = [asyncio.create_task(self._client()) for _ in range(self._plan.num_clients)]
        try:
            await asyncio.gather(*clients)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _client(self) -> None:
        plan = self._plan
        while self._next < plan.num_schemas:
            number, self._next = self._next, self._next + 1
            due = self._began + number * plan.seconds / plan.num_schemas
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            rng = Random(f"{plan.seed} {number}")
            is_bad = rng.random() < BAD_SHARE
            schema = bad_schema(number, rng) if is_bad else good_schema(number, rng)
            await self._ask(number, schema, is_bad=is_bad)

    async def _ask(self, number: int, schema: Json, *, is_bad: bool) -> None:
        body: Json = {"model": MODEL_NAME, "prompt": f"{number}", "max_tokens": MAX_TOKENS}
        body |= {"seed": number, "structured_outputs": {"json": schema}}
        try:
            status, text = await post(self._origin, "/v1/completions", body)
        except (OSError, HttpFault) as error:
            status, text = 0, repr(error)
        fault = fault_of(None if is_bad else schema, status, text)
        if fault:
            self.diary.blame("unexpected", f"schema {number}: {fault}")
        self.diary.counts["refused" if is_bad else "answered"] += 1

    async def _ask_plainly(self) -> None:
        while True:
            status, text = await post(
                self._origin, "/v1/completions", {"model": MODEL_NAME, **PLAIN}
            )
            if status == 200:
                self.diary.plain_texts.add(json.loads(text)["choices"][0]["text"])
            else:
                self.diary.blame("unexpected", f"plain: {status}: {text}")
            self.diary.counts["plain"] += 1
            await asyncio.sleep(PERIOD_SECONDS)

    async def _look(self) -> None:
        while True:
            pid = engine_pid(self._server.pid)
            grammars = grammars_pid(pid) if pid else None
            if grammars:
                self.diary.grammar_pids.add(grammars)
            mib = [_mib(one) for one in (self._server.pid, pid, grammars)]
            look = Look(*mib, num_processes(self._server.pid), self._next)
            self.diary.looks.append(look)
            await asyncio.sleep(PERIOD_SECONDS)


def _mib(pid: int | None) -> int:
    found = footprint(pid) if pid else None
    return found.rss_bytes >> 20 if found else 0


def checks(plan: Plan, diary: Diary) -> list[Check]:
    counts = diary.counts
    most = max((look.num_processes for look in diary.looks), default=0)
    return [
        Check("no unexpected answer", not counts["unexpected"], f"{counts['unexpected']}"),
        Check("all were asked", counts["answered"] + counts["refused"] == plan.num_schemas,
              f"{counts['answered']:,} answered, {counts['refused']:,} refused"),
        Check("the plain answer stays", len(diary.plain_texts) == 1,
              f"{len(diary.plain_texts)} texts of {counts['plain']:,} answers"),
        Check("one process follows grammars", len(diary.grammar_pids) == 1,
              f"{len(diary.grammar_pids)}"),
        Check("no process is left behind", most <= MOST_PROCESSES, f"at most {most}"),
        *(_level(diary.looks, name) for name in ("grammars", "engine", "api")),
    ]  # fmt: skip


def _level(looks: Sequence[Look], name: str) -> Check:
    """Compare the first and the last third of the time in which grammars replaced others."""
    full = [getattr(look, name) for look in looks if look.num_asked > 2 * NUM_KEPT]
    third = len(full) // 3
    return level(f"memory of {name}, MiB", full[:third], full[2 * third :], slack=MORE_MIB)


def soak(plan: Plan, log: Path) -> Diary:
    with ServerProcess(ensure_demo(print).model, FLAGS, log) as server:
        server.wait_until_healthy()
        running = SchemaSoak(plan, server)
        asyncio.run(running.run())
    return running.diary


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="At least; 0 for no pause.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--out", type=Path, help="Where to write the JSON.")
    args = parser.parse_args()
    plan = Plan(args.schemas, args.seconds, args.seed, args.clients)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server outlives its soak
    with tempfile.TemporaryDirectory(prefix="schema-soak-") as directory:
        diary = soak(plan, Path(directory) / "log")
    found = checks(plan, diary)
    if args.out:
        facts = {"machine": describe_machine(), "plan": plan, "flags": FLAGS, "checks": found,
                 "counts": diary.counts, "looks": thinned(diary.looks, NUM_WRITTEN)}  # fmt: skip
        write_json(args.out, facts)
    report(found, diary.stories)


if __name__ == "__main__":
    main()
