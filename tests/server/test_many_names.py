"""Many names on three servers that share a catalog: calls have one order, and answers fit into it.

The servers are whole but for their engines. Serials give the order; whether it is one that the
clock allows, and whether each answer's version fits into it, is checked.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import pytest

from lora_serve.catalog.rollout import Rollout, State
from lora_serve.messages import AdapterInfo
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.catalogued_servers import Fleet

SERVERS = ("one", "two", "three")
NUM_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Change:
    """A call that was done. digest: what its name stands for from then on; "" for nothing."""

    name: str
    serial: int
    digest: str
    begin: float
    end: float
    is_everywhere: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What a name stood for in one answer, or for a call that it was refused by: "" for nothing."""

    name: str
    digest: str
    begin: float
    end: float


BEGINNING = Change("", 0, "", 0.0, 0.0, True)


@dataclass
class History:
    changes: list[Change] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def check(self) -> None:
        """Assert that there is one order of all calls, and that it has a place for every answer."""
        by_name: defaultdict[str, list[Change]] = defaultdict(lambda: [BEGINNING])
        latest_begin = last = 0.0
        for change in sorted(self.changes, key=lambda one: one.serial):
            assert change.serial > last, f"two changes have the serial {change.serial}"
            assert change.end >= latest_begin, f"{change} comes after one that began after its end"
            last, latest_begin = change.serial, max(latest_begin, change.begin)
            assert change.digest or by_name[change.name][-1].digest, f"{change} had nothing to do"
            by_name[change.name].append(change)
        for answer in self.answers:
            assert _fits(answer, by_name[answer.name]), f"{answer} in {by_name[answer.name]}"


def _fits(answer: Answer, changes: list[Change]) -> bool:
    """Whether the name may have stood for this: no later change was everywhere before it began."""
    for change in reversed(changes):
        if change.digest == answer.digest and change.begin <= answer.end:
            return True
        if change.is_everywhere and change.end < answer.begin:
            return False
    raise AssertionError("in the beginning every name stands for nothing")


class LateEngine(FakeEngine):
    """Takes its time to publish what it has read."""

    async def load_lora_adapter(self, *args: object, **options: object) -> AdapterInfo:
        await asyncio.sleep(0.05)
        return await super().load_lora_adapter(*args, **options)  # type: ignore[arg-type]


class Operators:
    """Callers of all servers, who write down what they were told."""

    def __init__(self, directory: Path, clients: dict[str, httpx.AsyncClient], seed: int) -> None:
        self.history = History()
        self._directory = directory
        self._clients = clients
        self._rng = Random(seed)
        self._num_versions = 0
        self._digests: dict[str, str] = {}  # by their beginnings, as answers tell them

    async def load(self, name: str) -> None:
        """Load bytes that no name ever had."""
        self._num_versions += 1
        weights = f"version {self._num_versions}"
        path = write_adapter(self._directory / weights.replace(" ", ""), weights)
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        await self._call("/v1/load_lora_adapter", body)

    async def unload(self, name: str) -> None:
        await self._call("/v1/unload_lora_adapter", {"lora_name": name})

    async def _call(self, route: str, body: dict[str, object]) -> None:
        client = self._clients[self._rng.choice(SERVERS)]
        name, begin = str(body["lora_name"]), time.monotonic()
        response = await client.post(route, json=body)
        end = time.monotonic()
        if response.status_code == 404:
            self.history.answers.append(Answer(name, "", begin, end))
            return
        assert response.status_code == 200, response.text
        headers = response.headers
        digest = headers.get("X-LoRA-Digest", "")
        self._digests[digest[:12]] = digest
        is_everywhere = headers["X-LoRA-Rollout"] == "everywhere"
        serial = int(headers["X-LoRA-Serial"])
        self.history.changes.append(Change(name, serial, digest, begin, end, is_everywhere))

    async def ask_all(self, name: str) -> None:
        await asyncio.gather(*(self._ask(client, name) for client in self._clients.values()))

    async def _ask(self, client: httpx.AsyncClient, name: str) -> None:
        body, begin = {"model": name, "prompt": "hi", "max_tokens": 1}, time.monotonic()
        response = await client.post("/v1/completions", json=body)
        end = time.monotonic()
        if response.status_code == 503:  # on a slow machine: the name is not yet there
            return
        digest = ""
        if response.status_code != 404:
            assert response.status_code == 200, response.text
            told = response.json()["system_fingerprint"].split("-")[1]
            digest = self._digests.get(told, told)
        self.history.answers.append(Answer(name, digest, begin, end))

    async def operate(self, names: list[str], num_calls: int) -> None:
        """Mostly on a few names, so that calls of one meet."""
        for _ in range(num_calls):
            some = names[:4] if self._rng.random() < 0.5 else names
            name = self._rng.choice(some)
            await (self.unload(name) if self._rng.random() < 0.25 else self.load(name))
            await self.ask_all(name)


async def played(fleet: Fleet, directory: Path, num_names: int, num_calls: int) -> History:
    """Load all names, then change some of them by eight operators at once, and ask for them."""
    clients = {
        name: await fleet.start(name, engine=LateEngine if name == "two" else FakeEngine)
        for name in SERVERS
    }
    operators = Operators(directory, clients, num_names)
    names = [f"tenant-{i}" for i in range(num_names)]
    for first in range(0, num_names, NUM_AT_ONCE):
        await asyncio.gather(*(operators.load(name) for name in names[first : first + NUM_AT_ONCE]))
    await asyncio.gather(
        *(operators.operate(names, num_calls // NUM_AT_ONCE) for _ in range(NUM_AT_ONCE))
    )
    for name in names:
        await operators.ask_all(name)
    return operators.history


def with_whole_digests(history: History) -> History:
    """Answers tell the beginnings of digests, some of which were not yet known then."""
    whole = {change.digest[:12]: change.digest for change in history.changes}
    answers = [
        Answer(one.name, whole.get(one.digest[:12], one.digest), one.begin, one.end)
        for one in history.answers
    ]
    return History(history.changes, answers)


@pytest.mark.parametrize(
    ("num_names", "num_calls"), [(24, 48), pytest.param(1000, 800, marks=pytest.mark.slow)]
)
async def test_every_answer_fits_into_the_one_order_of_all_calls(
    fleet: Fleet, tmp_path: Path, num_names: int, num_calls: int
) -> None:
    history = with_whole_digests(await played(fleet, tmp_path, num_names, num_calls))
    history.check()
    done = [change for change in history.changes if change.is_everywhere]
    assert len(done) > num_names, "calls come to an end"
    assert len({answer.digest for answer in history.answers}) > num_names
    assert any(not answer.digest for answer in history.answers), "some name stood for nothing"


async def test_a_fleet_that_claims_too_early_is_found_out(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_everywhere(rollout: Rollout) -> bool:
        return any(one.state is State.READY for one in rollout.replicas)

    monkeypatch.setattr(Rollout, "is_everywhere", property(is_everywhere))
    monkeypatch.setattr(Rollout, "is_settled", property(is_everywhere))
    history = with_whole_digests(await played(fleet, tmp_path, 8, 32))
    with pytest.raises(AssertionError, match="Answer"):
        history.check()


def changes(*told: tuple[int, str, float, float]) -> Iterable[Change]:
    return (Change("a", serial, digest, begin, end, True) for serial, digest, begin, end in told)


@pytest.mark.parametrize(
    "history",
    [
        History([*changes((2, "x", 1, 2), (1, "y", 3, 4))]),
        History([*changes((1, "x", 1, 2), (1, "y", 3, 4))]),
        History([*changes((1, "", 1, 2))]),
        History([*changes((1, "x", 1, 2), (2, "y", 3, 4))], [Answer("a", "x", 5, 6)]),
        History([*changes((1, "x", 1, 2))], [Answer("a", "", 3, 4)]),
        History([*changes((1, "x", 5, 6))], [Answer("a", "x", 1, 2)]),
    ],
    ids=["order", "serial", "nothing to unload", "old version", "not there", "not yet there"],
)
def test_a_history_that_cannot_be_is_refused(history: History) -> None:
    with pytest.raises(AssertionError):
        history.check()


def test_while_a_change_lasts_either_version_may_answer() -> None:
    made = [*changes((1, "x", 1, 2), (2, "y", 3, 6))]
    History(made, [Answer("a", "x", 4, 5), Answer("a", "y", 4, 5), Answer("a", "x", 5, 7)]).check()
