"""Adapters come, change and go while clients ask; what loads take then, and what memory does."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from benchmarks.common.processes import server_footprints
from benchmarks.soak.churn.fleet import Fleet, draws
from benchmarks.soak.churn.server import Loaded, RefusedError, Server, random_prompt

NUM_CLIENTS = 4
NEW_NAME_EVERY = 5  # of so many changes one brings a new name and takes an old one
ANSWER_TOKENS = 8
CLIENT_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of both processes, so many seconds after the begin."""

    seconds: float
    api_bytes: int
    engine_bytes: int


@dataclass(slots=True)
class Churned:
    """What came of it. outcomes: of the clients' requests, and of changes, by kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    in_place: list[Loaded] = field(default_factory=list)
    new_names: list[Loaded] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)


async def churn(
    server: Server, fleet: Fleet, server_pid: int, *, seconds: float, changes_per_minute: float
) -> Churned:
    churned = Churned()
    async with asyncio.TaskGroup() as endless:
        tasks = [
            endless.create_task(_client(server, fleet, churned, f"client {number}"))
            for number in range(NUM_CLIENTS)
        ]
        tasks.append(endless.create_task(_watch(server_pid, churned)))
        await _changes(server, fleet, churned, seconds, changes_per_minute)
        for task in tasks:
            task.cancel()
    return churned


async def _changes(
    server: Server, fleet: Fleet, churned: Churned, seconds: float, per_minute: float
) -> None:
    """One after the other, each at its time or as soon as the one before has ended."""
    begin, rng = time.monotonic(), Random("changes")
    for number in itertools.count():
        due = begin + number * 60 / per_minute
        if due > begin + seconds:
            return
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await _change(server, fleet, churned, rng, number)


async def _change(server: Server, fleet: Fleet, churned: Churned, rng: Random, number: int) -> None:
    prompt = random_prompt(rng)
    if number % NEW_NAME_EVERY:
        member = rng.choice(fleet.members)
        fleet.renew(member)
        churned.in_place.append(await server.load_and_ask(member, prompt))
        return
    member = fleet.new_member()
    churned.new_names.append(await server.load_and_ask(member, prompt))
    place = rng.randrange(len(fleet.members))
    old, fleet.members[place] = fleet.members[place], member
    old.is_gone = True
    await server.unload(old)
    fleet.remove(old)


async def _client(server: Server, fleet: Fleet, churned: Churned, seed: str) -> None:
    """Until it is cancelled."""
    rng, members = Random(seed), draws(fleet.members, seed)
    while True:
        await asyncio.sleep(rng.expovariate(1 / CLIENT_PAUSE_SECONDS))
        member = next(members)
        was_changing = member.is_changing
        try:
            await server.ask(member, random_prompt(rng), ANSWER_TOKENS)
            churned.outcomes["answered by the right version"] += 1
        except RefusedError as error:
            if member.is_gone:
                churned.outcomes["refused: unloaded meanwhile"] += 1
            elif was_changing or member.is_changing:
                churned.outcomes["refused: its files were being replaced"] += 1
            else:
                churned.outcomes[f"refused: {error}"] += 1


async def _watch(server_pid: int, churned: Churned) -> None:
    """Until it is cancelled."""
    begin = time.monotonic()
    while True:
        await asyncio.sleep(1)
        churned.memory.append(memory_of(server_pid, time.monotonic() - begin))


def memory_of(server_pid: int, seconds: float) -> Memory:
    api, engine = server_footprints(server_pid)
    return Memory(round(seconds, 1), api.rss_bytes, engine.rss_bytes)
