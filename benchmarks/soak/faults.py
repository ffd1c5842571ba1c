"""What goes wrong on purpose: each a coroutine that does it once.

When it is done stands in `plan`: a fault comes again after its own interval, give or take a third,
so that over an hour all meet each other. The engine is killed in the first quarter only; afterwards
one engine lives on, so that its memory can be seen to keep its level.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from benchmarks.common.processes import engine_pid
from benchmarks.soak.admins import race
from benchmarks.soak.cold_answers import post
from benchmarks.soak.hostile import HOSTILE_BODIES, read_slowly
from benchmarks.soak.journal import (
    BAD_BODY,
    GIVEN_UP,
    NOT_FORGOTTEN,
    QUEUE_FULL,
    RACED,
    UNEXPECTED,
    Journal,
    is_full,
)
from benchmarks.soak.samples import read_metrics
from benchmarks.soak.tenants import Landlord, Span
from benchmarks.soak.traffic import Traffic
from lora_serve.bench.http_stream import HttpFault, Origin
from lora_serve.demo.server_process import ServerProcess
from tests.fakes.redis_server import RedisServer

FLOOD = 120  # questions at once: more than may run and wait
CROWD = 24
REDIS_BYTES = 16_000_000
SLOW_SECONDS = 120.0  # by when a reader of nothing must have been given up
NOTICE_SECONDS = 30.0  # a tier that has failed is left alone for a while


def bound_redis(redis: RedisServer) -> None:
    """Set it up as the documents say: a bound, and blocks evicted before what leads to them."""
    with redis.client() as client:
        client.config_set("maxmemory", REDIS_BYTES)
        client.config_set("maxmemory-policy", "volatile-lru")


@dataclass(frozen=True, slots=True)
class Fault:
    """every: seconds between two. until: the share of the soak in which it happens."""

    do: Callable[[Random], Awaitable[None]]
    every: float
    until: float = 1.0


@dataclass(slots=True)
class Faults:
    server: ServerProcess
    origin: Origin
    redis: RedisServer
    landlord: Landlord
    traffic: Traffic
    journal: Journal

    def plan(self) -> list[Fault]:
        return [
            Fault(self.kill_engine, every=150, until=0.25),
            Fault(self.kill_redis, every=200),
            Fault(self.pause_redis, every=140),
            Fault(self.flood, every=75),
            Fault(self.crowd_of_one, every=50),
            Fault(self.replace_adapter, every=2.5),
            Fault(self.unload_adapter, every=20),
            Fault(self.reset_cache, every=45),
            Fault(self.race_of_admins, every=10),
            Fault(self.slow_reader, every=40),
            Fault(self.hostile_body, every=1.0),
        ]

    async def repeat(self, fault: Fault, seconds: float, seed: str) -> None:
        """Plan for a soak of so many seconds; a short one has all faults, only faster."""
        rng = Random(seed)
        every = fault.every * min(1.0, seconds / 1200)
        end = time.monotonic() + seconds * fault.until
        while (pause := every * rng.uniform(0.67, 1.33)) + time.monotonic() < end:
            await asyncio.sleep(pause)
            await fault.do(rng)

    async def kill_engine(self, rng: Random) -> None:
        pid = engine_pid(self.server.pid)
        if pid is None:
            return  # it is being started
        num_restarts = await self._num_restarts()
        outage = Span("engine", time.monotonic())
        self.journal.outages.append(outage)
        self.journal.note_event("engine killed")
        os.kill(pid, signal.SIGKILL)
        while await self._num_restarts() <= num_restarts:
            await asyncio.sleep(0.2)
        outage.end = time.monotonic()

    async def kill_redis(self, rng: Random) -> None:
        self.journal.note_event("Redis killed")
        trouble = self._new_redis_trouble()
        self.redis.kill()
        await asyncio.sleep(rng.uniform(2, 12))
        await asyncio.to_thread(self.redis.start)
        await asyncio.to_thread(bound_redis, self.redis)
        trouble.end = time.monotonic() + NOTICE_SECONDS

    async def pause_redis(self, rng: Random) -> None:
        if not self.redis.is_running:
            return
        self.journal.note_event("Redis paused")
        trouble = self._new_redis_trouble()
        self.redis.pause()
        await asyncio.sleep(rng.uniform(1, 5))
        if self.redis.is_running:
            self.redis.resume()
        trouble.end = time.monotonic() + NOTICE_SECONDS

    async def flood(self, rng: Random) -> None:
        self.journal.note_event("flood")
        await self.traffic.crowd(f"flood {rng.random()}", FLOOD, equal=False)

    async def crowd_of_one(self, rng: Random) -> None:
        await self.traffic.crowd(f"crowd {rng.random()}", CROWD, equal=True)

    async def replace_adapter(self, rng: Random) -> None:
        await self._change(rng, self.landlord.load, "load")

    async def unload_adapter(self, rng: Random) -> None:
        await self._change(rng, self.landlord.unload, "unload")

    async def reset_cache(self, rng: Random) -> None:
        """All of it, or one name's."""
        tenant = rng.choice(self.landlord.tenants)
        body: dict[str, object] = {} if rng.random() < 0.1 else {"lora_name": tenant.name}
        begin = time.monotonic()
        try:
            status, text = await post(self.origin, "/reset_prefix_cache", body)
        except (OSError, HttpFault) as error:
            status, text = 0, repr(error)
        if status == 503 and "not yet forgotten by redis" in text:
            is_excused = self.journal.had_redis_trouble(begin, time.monotonic())
            self.journal.note(NOT_FORGOTTEN if is_excused else UNEXPECTED, text)
            return
        is_absent = status == 404 and tenant.may_be_absent(begin, time.monotonic())
        if status != 200 and not is_absent:
            self.journal.note_call_faults("reset", begin, [f"{status}: {text}"])

    async def race_of_admins(self, rng: Random) -> None:
        begin = time.monotonic()
        faults = await race(self.origin, self.landlord.versions, rng)
        self.journal.note_call_faults("race of admins", begin, faults)
        self.journal.note(RACED)

    async def slow_reader(self, rng: Random) -> None:
        begin = time.monotonic()
        status, end = await read_slowly(self.origin, SLOW_SECONDS)
        if "--max-stream-backlog" in end:
            self.journal.note(GIVEN_UP)
        elif status == 200:
            self.journal.note("slow reader, kept")
        elif is_full(status, end):
            self.journal.note(QUEUE_FULL)
        else:
            self.journal.note_call_faults("slow reader", begin, [f"{status} {end}"])

    async def hostile_body(self, rng: Random) -> None:
        body = rng.choice(HOSTILE_BODIES)
        begin = time.monotonic()
        try:
            status, text = await body.send(self.origin)
        except (OSError, HttpFault) as error:
            status, text = 0, repr(error)
        if status in body.statuses:
            self.journal.note(BAD_BODY)
        elif is_full(status, text):
            self.journal.note(QUEUE_FULL)
        elif status == 503:
            self.journal.note_call_faults(body.title, begin, [text])
        else:
            self.journal.note(UNEXPECTED, f"{body.title}: {status} {text}")

    def _new_redis_trouble(self) -> Span:
        trouble = Span("Redis", time.monotonic())
        self.journal.redis_troubles.append(trouble)
        return trouble

    async def _change(
        self, rng: Random, change: Callable[..., Awaitable[list[str]]], what: str
    ) -> None:
        tenant = rng.choice(self.landlord.tenants)
        if not tenant.is_changing:
            begin = time.monotonic()
            self.journal.note_call_faults(f"{what} {tenant.name}", begin,
                                          await change(tenant, rng))  # fmt: skip

    async def _num_restarts(self) -> float:
        return (await read_metrics(self.origin)).get("lora_serve:engine_restarts_total", -1)
