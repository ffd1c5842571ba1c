"""Clients that ask the table's questions of random tenants, wait a while, and ask again.

Many know a salt, some hang up in the middle; now and then all ask at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.soak.asking import ask
from benchmarks.soak.cold_answers import MODEL_NAME
from benchmarks.soak.journal import Journal
from benchmarks.soak.questions import Question
from benchmarks.soak.tenants import Tenant
from lora_serve.bench.http_stream import Origin

SALTS = ("", "", "", "red", "blue")


@dataclass(slots=True)
class Traffic:
    """pause_seconds: of a client between two questions, on average."""

    origin: Origin
    questions: Sequence[Question]
    tenants: Sequence[Tenant]
    journal: Journal
    pause_seconds: float

    async def client(self, seed: str) -> None:
        """Until it is cancelled."""
        rng = Random(seed)
        while True:
            await asyncio.sleep(rng.expovariate(1 / self.pause_seconds))
            await self.ask_one(rng)

    async def crowd(self, seed: str, count: int, equal: bool) -> None:
        """`count` questions at once; all the same one, or any."""
        rng = Random(seed)
        seeds = [f"{seed} {0 if equal else number}" for number in range(count)]
        rng.shuffle(seeds)
        await asyncio.gather(*(self.ask_one(Random(one)) for one in seeds))

    async def ask_one(self, rng: Random) -> None:
        question, tenant = rng.choice(self.questions), self._tenant(rng)
        stream = rng.random() < 0.6
        leaves = stream and rng.random() < 0.15
        heard = await ask(
            self.origin,
            question,
            tenant.name if tenant else MODEL_NAME,
            cache_salt=rng.choice(SALTS),
            stream=stream,
            leave_after_tokens=rng.randrange(1, 12) if leaves else None,
        )
        self.journal.note_answer(question, tenant, heard)

    def _tenant(self, rng: Random) -> Tenant | None:
        """The first is asked most; None is the base model."""
        if rng.random() < 0.2:
            return None
        weights = [1 / (rank + 1) for rank in range(len(self.tenants))]
        return rng.choices(self.tenants, weights)[0]
