from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_serve.config import EngineConfig
from lora_serve.engine.frontend.supervisor import (
    LONGEST_DELAY_SECONDS,
    STABLE_SECONDS,
    Backoff,
    EngineSupervisor,
)
from lora_serve.errors import EngineDeadError
from lora_serve.messages import EngineMessage, EngineReady, EngineReply
from tests.fakes.engine_client import READY, FakeClient


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_restart_is_at_once_and_further_ones_wait_ever_longer() -> None:
    backoff = Backoff(Clock())
    delays = [backoff.next_delay() for _ in range(8)]
    assert delays == [0, 1, 2, 4, 8, 16, LONGEST_DELAY_SECONDS, LONGEST_DELAY_SECONDS]


def test_a_stable_time_forgives_earlier_deaths() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    for _ in range(4):
        backoff.next_delay()
    backoff.note_started()
    clock.now += STABLE_SECONDS - 1
    assert backoff.next_delay() > 0
    backoff.note_started()
    clock.now += STABLE_SECONDS
    assert backoff.next_delay() == 0


@dataclass
class Diary:
    """An EngineUser that writes down what it is told."""

    told: list[str] = field(default_factory=list)

    async def take_in(self, reply: EngineReply) -> None:
        self.told.append("reply")

    def engine_died(self, error: EngineDeadError) -> None:
        self.told.append("died")

    def restart_failed(self, error: Exception) -> None:
        self.told.append(f"failed: {error}")

    def first_messages(self) -> Sequence[EngineMessage]:
        return []

    async def engine_is_back(self) -> None:
        self.told.append("back")


async def test_another_model_at_the_same_place_is_not_served_in_silence() -> None:
    first, user = FakeClient(), Diary()
    others = iter([FakeClient(ready=EngineReady(fingerprint=b"another")), FakeClient()])
    supervisor = EngineSupervisor(EngineConfig(), first, READY, user, lambda: next(others))
    first.die()
    async with asyncio.timeout(5):
        while "back" not in user.told:
            await asyncio.sleep(0.01)
    assert [told.partition(":")[0] for told in user.told] == ["died", "failed", "back"]
    assert "the model's files have changed" in user.told[1]
    assert supervisor.is_serving
    await supervisor.close()


class Eager(Backoff):
    def next_delay(self) -> float:
        return 0.0


async def test_a_machine_short_of_files_or_processes_is_asked_again_until_it_has_some() -> None:
    first, user = FakeClient(), Diary()
    unborn = FakeClient(start_error=BlockingIOError("Resource temporarily unavailable"))
    fit = FakeClient()
    attempts: list[FakeClient | OSError] = [OSError("Too many open files"), unborn, fit]

    def make_client() -> FakeClient:
        attempt = attempts.pop(0)
        if isinstance(attempt, OSError):
            raise attempt
        return attempt

    supervisor = EngineSupervisor(EngineConfig(), first, READY, user, make_client, Eager())
    first.die()
    async with asyncio.timeout(5):
        while "back" not in user.told:
            await asyncio.sleep(0.01)
    assert user.told == [
        "died",
        "failed: Too many open files",
        "failed: Resource temporarily unavailable",
        "back",
    ]
    assert unborn.was_closed
    assert supervisor.is_serving
    await supervisor.close()


async def test_closing_ends_an_engine_that_is_just_being_started() -> None:
    first, second, user = FakeClient(), FakeClient(), Diary()
    starts = asyncio.Event()

    class Slow(FakeClient):
        async def start(self, config: EngineConfig) -> EngineReady:
            starts.set()
            await asyncio.sleep(60)
            return READY

    second = Slow()
    supervisor = EngineSupervisor(EngineConfig(), first, READY, user, lambda: second)
    first.die()
    await asyncio.wait_for(starts.wait(), 5)
    await supervisor.close()
    assert second.was_closed
    assert not supervisor.is_serving
