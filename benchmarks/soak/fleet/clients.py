"""Asks for answers, and notes which version gave them, and whether it is always the same answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import accumulate
from random import Random

import httpx

from benchmarks.soak.fleet.history import ABSENT, Answer
from benchmarks.soak.fleet.journal import (
    MACHINE_STILL,
    NO_SUCH_NAME,
    SERVER_DOWN,
    UNEXPECTED,
    Journal,
)
from benchmarks.soak.fleet.replicas import Replicas
from benchmarks.soak.fleet.troubles import MACHINE, Troubles

NUM_QUESTIONS = 4
PROMPT_TOKENS, ANSWER_TOKENS = 24, 6
AGAIN_SECONDS = 0.3  # after a refusal
HOT_SHARE = 0.5  # of all requests, for the names that operators contend for
QUESTIONS = [
    [Random(f"question {number}").randrange(3, 700) for _ in range(PROMPT_TOKENS)]
    for number in range(NUM_QUESTIONS)
]


class Names:
    """The names: a few are asked for and changed most, the others by Zipf's law."""

    def __init__(self, count: int, num_hot: int) -> None:
        self.all = [f"adapter-{number}" for number in range(count)]
        self.hot = self.all[:num_hot]
        self._weights = [*accumulate(1 / (rank + 1) for rank in range(count))]

    def draw(self, rng: Random) -> str:
        if rng.random() < HOT_SHARE:
            return rng.choice(self.hot)
        return rng.choices(self.all, cum_weights=self._weights)[0]


class Clients:
    def __init__(
        self,
        replicas: Replicas,
        names: Names,
        journal: Journal,
        troubles: Troubles,
        http: httpx.AsyncClient,
    ) -> None:
        self._replicas = replicas
        self._names = names
        self._journal = journal
        self._troubles = troubles
        self._http = http

    async def run(self, seed: str, pause_seconds: float) -> None:
        """Ask one after the other, until it is cancelled."""
        rng = Random(seed)
        while True:
            await asyncio.sleep(rng.expovariate(1 / pause_seconds))
            url = rng.choice(self._replicas.urls)
            if not await self.ask(url, self._names.draw(rng), rng.randrange(NUM_QUESTIONS)):
                await asyncio.sleep(AGAIN_SECONDS)

    async def ask(self, url: str, name: str, question: int) -> bool:
        """Whether there was an answer."""
        body = {"model": name, "prompt": QUESTIONS[question], "max_tokens": ANSWER_TOKENS,
                "temperature": 0, "logprobs": 1}  # fmt: skip
        process, begin = self._replicas.process(url), time.monotonic()
        try:
            response = await self._http.post(f"{url}/v1/completions", json=body)
        except httpx.TransportError as error:
            self._note_refusal(url, name, begin, f"{type(error).__name__}: {error}")
            return False
        end = time.monotonic()
        if response.status_code == 404:
            self._journal.answers.append(Answer(name, ABSENT, begin, end, process))
            self._journal.heard[NO_SUCH_NAME] += 1
            return True
        if response.status_code != 200:
            self._note_refusal(url, name, begin, f"{response.status_code} {response.text}")
            return False
        told = response.json()
        answer = Answer(name, digest_of(told["system_fingerprint"]), begin, end, process)
        self._journal.note_answer(answer, question, json.dumps(told["choices"]))
        return True

    def _note_refusal(self, url: str, name: str, begin: float, what: str) -> None:
        end = time.monotonic()
        if self._troubles.met(url, begin, end):
            self._journal.heard[SERVER_DOWN] += 1
        elif self._troubles.met(MACHINE, begin, end):
            self._journal.heard[MACHINE_STILL] += 1
        else:
            self._journal.blame(UNEXPECTED, f"{name} at {begin:.1f} s: {what}")


def digest_of(fingerprint: str) -> str:
    """The digest in MODEL-DIGEST-gN."""
    return fingerprint.split("-")[1]


async def versions_at(http: httpx.AsyncClient, url: str, names: Sequence[str]) -> dict[str, str]:
    """What names stand for by the list of models."""
    cards = (await http.get(f"{url}/v1/models")).json()["data"]
    digests = {card["id"]: card["digest"][:12] for card in cards if "digest" in card}
    return {name: digests.get(name, ABSENT) for name in names}
