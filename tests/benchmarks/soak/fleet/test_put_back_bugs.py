"""Runs of the soak's own clients and operators on small fleets: a fleet with a bug fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import pytest

from benchmarks.common.checks import Check
from benchmarks.soak.fleet.clients import NUM_QUESTIONS, Clients, Names, versions_at
from benchmarks.soak.fleet.history import ABSENT, Answer
from benchmarks.soak.fleet.journal import Journal
from benchmarks.soak.fleet.operators import Operators
from benchmarks.soak.fleet.replicas import Fault
from benchmarks.soak.fleet.troubles import STORE, Troubles
from benchmarks.soak.fleet.verdict import Record, checks
from benchmarks.soak.fleet.versions import Version

NUM_NAMES, NUM_ROUNDS = 8, 150
LATE_EVERY = 4  # changes, of which one reaches a replica late
NOTHING = (0, ABSENT)


@dataclass
class NewVersions:
    """Versions without files, in the place of `Versions`."""

    directory: Path = Path("/versions")
    _number: int = 0

    def new(self) -> Version:
        self._number += 1
        return Version(f"v{self._number}", self.directory / f"v{self._number}")


@dataclass
class Replica:
    """has: by name, a serial and a version. late: what it has yet to take."""

    has: dict[str, tuple[int, str]] = field(default_factory=dict)
    late: dict[str, tuple[int, str]] = field(default_factory=dict)

    def take(self, name: str, record: tuple[int, str]) -> None:
        self.has[name] = max(record, self.has.get(name, NOTHING))

    def catch_up(self) -> None:
        for name, record in self.late.items():
            self.take(name, record)
        self.late = {}

    def version(self, name: str) -> str:
        return self.has.get(name, NOTHING)[1]


class Fleet:
    """Replicas of one catalog, each with an address that is served in this process."""

    faults: Mapping[Fault, int] = {}
    replica_class = Replica

    def __init__(self) -> None:
        self.urls = [f"http://replica-{number}" for number in range(3)]
        self.replicas = {url: self.replica_class() for url in self.urls}
        self.num_changes = self.num_asked = 0

    def process(self, url: str) -> str:
        return url

    async def start(self) -> None:
        raise NotImplementedError("it runs already")

    def stop(self) -> None:
        raise NotImplementedError("nothing is to be stopped")

    async def handle(self, request: httpx.Request) -> httpx.Response:
        url = f"http://{request.url.host}"
        replica, body = self.replicas[url], json.loads(request.content or "{}")
        if request.url.path == "/v1/models":
            cards = [{"id": name, "digest": of[1]} for name, of in replica.has.items() if of[1]]
            return httpx.Response(200, json={"data": cards})
        if request.url.path == "/v1/completions":
            return self.answer(url, body["model"], body["prompt"])
        return await self.change(url, body["lora_name"], Path(body.get("lora_path", "")))

    def answer(self, url: str, name: str, prompt: list[int]) -> httpx.Response:
        self.num_asked += 1
        version = self.replicas[url].version(name)
        if version == ABSENT:
            return httpx.Response(404)
        fingerprint = f"model-{version}-g0"
        told = {"system_fingerprint": fingerprint, "choices": self.bits(url, version, prompt)}
        return httpx.Response(200, json=told)

    def bits(self, url: str, version: str, prompt: list[int]) -> str:
        return f"{version} says {prompt}"

    async def change(self, url: str, name: str, path: Path) -> httpx.Response:
        """Load what the last part of the path names, or unload."""
        if self.is_not_there(path):
            return httpx.Response(400)
        self.num_changes += 1
        self.settle()
        record, is_late = (self.serial(), path.name), self.num_changes % LATE_EVERY == 0
        for each, replica in self.replicas.items():
            if is_late and each == self.urls[-1]:
                replica.late[name] = record
            else:
                replica.take(name, record)
        await asyncio.sleep(0)  # others may come in between
        headers = {"X-LoRA-Serial": str(record[0])}
        headers |= {"X-LoRA-Rollout": self.state(is_late=is_late)}
        return httpx.Response(200, headers=headers)

    def is_not_there(self, path: Path) -> bool:
        return "nothing" in path.parts

    def serial(self) -> int:
        return self.num_changes

    def state(self, *, is_late: bool) -> str:
        return "incomplete" if is_late else "everywhere"

    def settle(self) -> None:
        for replica in self.replicas.values():
            replica.catch_up()


async def run(fleet: Fleet) -> Record:
    names, journal, troubles, rng = Names(NUM_NAMES, 2), Journal(), Troubles(), Random(3)
    async with httpx.AsyncClient(transport=httpx.MockTransport(fleet.handle)) as http:
        asked = (fleet, names, journal, troubles, http)
        clients = Clients(*asked)
        operators = Operators(fleet, names, NewVersions(), journal, troubles, http)  # type: ignore[arg-type]
        with troubles.of(STORE, "stores stopped"):  # so that changes may come late
            await operators.load_all(1)
            for number in range(NUM_ROUNDS):
                await asyncio.gather(*(operators.change(rng) for _ in range(1 + number % 2)))
                for url in fleet.urls * 2:
                    await clients.ask(url, names.draw(rng), rng.randrange(NUM_QUESTIONS))
        fleet.settle()
        told = [await versions_at(http, url, names.all) for url in fleet.urls]
    end = max(answer.end for answer in journal.answers) + 1
    agreed = [Answer(name, told[0][name], end, end) for name in names.all]
    return Record(
        journal=journal,
        num_names=NUM_NAMES,
        num_kinds_of_faults=1,
        faults=troubles.counts,
        finals=agreed if all(each == told[0] for each in told) else None,
    )


async def failed(fleet: Fleet) -> list[str]:
    found: list[Check] = checks(await run(fleet))
    return [check.title for check in found if not check.passed]


async def test_nothing_is_wrong_with_a_fleet_without_a_bug() -> None:
    assert await failed(Fleet()) == []


# ── bugs that are put back ──────────────────────────────────────────────────────────────────────


class MissesChanges(Replica):
    num_offered = 0

    def take(self, name: str, record: tuple[int, str]) -> None:
        self.num_offered += 1
        if self.num_offered % 7:
            super().take(name, record)


@dataclass
class AnswersOnceByTheNextVersion(Replica):
    """It has that one already, and goes back to the one before until it is told of it."""

    given: set[tuple[str, int]] = field(default_factory=set)

    def version(self, name: str) -> str:
        serial, version = self.late.get(name, NOTHING)
        if serial and (name, serial) not in self.given:
            self.given.add((name, serial))
            return version
        return super().version(name)


@dataclass
class LoadsItsModulesAgain(Replica):
    """It was started anew, and what its flags name is back though it was unloaded everywhere."""

    modules: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, record: tuple[int, str]) -> None:
        self.modules.setdefault(name, record[1])
        super().take(name, record)

    def version(self, name: str) -> str:
        return super().version(name) or self.modules.get(name, ABSENT)


class ModulesComeBack(Fleet):
    replica_class = LoadsItsModulesAgain


class OldVersionsStay(Fleet):
    replica_class = MissesChanges


class VersionsReturn(Fleet):
    replica_class = AnswersOnceByTheNextVersion


class ToldTooEarly(Fleet):
    def state(self, *, is_late: bool) -> str:
        return "everywhere"


class SerialsOutOfOrder(Fleet):
    """Two changes that follow each other get their serials the other way round."""

    def serial(self) -> int:
        return self.num_changes + (1 if self.num_changes % 2 else -1)


class OtherBits(Fleet):
    def bits(self, url: str, version: str, prompt: list[int]) -> str:
        is_other = url == self.urls[1] and self.num_asked % 50 == 0
        return super().bits(url, version, prompt) + "!" * is_other


class Refuses(Fleet):
    def answer(self, url: str, name: str, prompt: list[int]) -> httpx.Response:
        refused = httpx.Response(503, text="busy")
        answer = super().answer(url, name, prompt)
        return refused if self.num_asked % 100 == 0 else answer


class LoadsNothing(Fleet):
    def is_not_there(self, path: Path) -> bool:
        return False


class NeverSettles(Fleet):
    def settle(self) -> None:
        pass


VERSIONS = "no answer by a version that the name did not stand for"
REFUSALS = "no refusal but by what was down"


@pytest.mark.parametrize(
    ("fleet", "told"),
    [
        (OldVersionsStay, VERSIONS),
        (ModulesComeBack, VERSIONS),
        (ToldTooEarly, VERSIONS),
        (VersionsReturn, "no process went back to an earlier version"),
        (SerialsOutOfOrder, "serials are in the order of calls"),
        (OtherBits, "a version's answers are the same bits everywhere"),
        (Refuses, REFUSALS),
        (LoadsNothing, REFUSALS),
        (NeverSettles, "all replicas agree at the end"),
    ],
)
async def test_a_run_of_a_fleet_with_a_bug_fails(fleet: type[Fleet], told: str) -> None:
    assert told in await failed(fleet())
