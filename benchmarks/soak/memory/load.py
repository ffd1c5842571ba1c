"""What a round of load asks: as much in each, and with contents that no earlier round had.

So whatever is kept by content, name or version grows from round to round, unless it is bounded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random

from benchmarks.soak.asking import ask
from benchmarks.soak.cold_answers import MODEL_NAME, load_adapter, post
from benchmarks.soak.hostile import HOSTILE_BODIES
from benchmarks.soak.questions import Question, make_questions
from benchmarks.soak.schemas import bad_schema, good_schema
from lora_serve.bench.http_stream import Origin

NUM_NAMES = 4  # that stay, and are loaded in place in each round
NUM_SCHEMAS = 6
AT_ONCE = 8
SALTS = ("", "", "red", "blue")


class Load:
    """versions: directories of adapters."""

    def __init__(
        self, origin: Origin, versions: list[Path], num_questions: int, hidden_size: int
    ) -> None:
        self._origin = origin
        self._versions = versions
        self._num_questions = num_questions
        self._hidden_size = hidden_size

    async def round(self, number: int) -> None:
        rng = Random(number)
        kept = [f"kept-{index}" for index in range(NUM_NAMES)]
        passing = [f"passing-{number}-{index}" for index in range(NUM_NAMES)]
        for index, name in enumerate((*kept, *passing)):
            version = self._versions[(number + index) % len(self._versions)]
            await load_adapter(self._origin, name, version)
        names = (MODEL_NAME, *kept, *passing)
        seed = 10_000 + number
        questions = make_questions(seed, self._num_questions, self._hidden_size)
        works = [self._ask(question, rng.choice(names), rng) for question in questions]
        works += [self._schema(number * NUM_SCHEMAS + index, rng) for index in range(NUM_SCHEMAS)]
        works += [self._hostile(body.send) for body in HOSTILE_BODIES]
        works += [self._post("/reset_prefix_cache", {"lora_name": name}) for name in kept[:2]]
        rng.shuffle(works)
        turns = asyncio.Semaphore(AT_ONCE)

        async def in_turn(work: Coroutine[None, None, None]) -> None:
            async with turns:
                await work

        await asyncio.gather(*map(in_turn, works))
        for name in passing:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _ask(self, question: Question, name: str, rng: Random) -> None:
        stream = rng.random() < 0.6
        leaves = rng.randrange(1, 12) if stream and rng.random() < 0.15 else None
        heard = await ask(self._origin, question, name, cache_salt=rng.choice(SALTS),
                          stream=stream, leave_after_tokens=leaves)  # fmt: skip
        assert heard.status == 200, heard.message

    async def _schema(self, number: int, rng: Random) -> None:
        is_bad = number % NUM_SCHEMAS == 0
        schema = (bad_schema if is_bad else good_schema)(number, rng)
        body = {"prompt": f"{number}", "max_tokens": 24, "structured_outputs": {"json": schema}}
        status, text = await post(self._origin, "/v1/completions", body)
        assert status == (400 if is_bad else 200), text

    async def _hostile(self, send: Callable[[Origin], Coroutine[None, None, object]]) -> None:
        await send(self._origin)

    async def _post(self, path: str, body: dict[str, object]) -> None:
        status, text = await post(self._origin, path, body)
        assert status == 200, json.dumps([path, status, text])
