"""Calls to the server under churn, with their times.

Every answer is checked to be given by the version that must have given it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from random import Random

from benchmarks.soak.churn.fleet import Member
from benchmarks.soak.cold_answers import post
from lora_serve.bench.http_stream import Origin


class WrongVersionError(Exception):
    """A version answered that should not have."""


class RefusedError(Exception):
    """The server's answer is an error."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Seconds from the load call to its return, and to the first right answer after it."""

    load_seconds: float
    answer_seconds: float


@dataclass(frozen=True, slots=True)
class Server:
    origin: Origin

    async def load(self, member: Member) -> None:
        body = {"lora_name": member.name, "lora_path": str(member.path), "load_inplace": True}
        await self._post("/v1/load_lora_adapter", body)
        member.note_loaded()

    async def unload(self, member: Member) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": member.name})

    async def load_and_ask(self, member: Member, prompt: list[int]) -> Loaded:
        """Raises WrongVersionError if the first answer is not of what was loaded."""
        begin = time.perf_counter()
        await self.load(member)
        loaded = time.perf_counter()
        await self.ask(member, prompt)
        return Loaded(loaded - begin, time.perf_counter() - begin)

    async def timed(self, member: Member, prompt: list[int]) -> float:
        """Seconds of one answer of one token."""
        begin = time.perf_counter()
        await self.ask(member, prompt)
        return time.perf_counter() - begin

    async def ask(self, member: Member, prompt: list[int], max_tokens: int = 1) -> str:
        """The answer's choices as JSON.

        Raises:
            WrongVersionError: neither its version gave them, nor one that it got meanwhile.
            RefusedError: there is no answer.
        """
        possible = set(member.live)
        body = {"model": member.name, "prompt": prompt, "max_tokens": max_tokens,
                "temperature": 0, "logprobs": 1}  # fmt: skip
        answer = json.loads(await self._post("/v1/completions", body))
        digest = answer["system_fingerprint"].split("-")[1]
        if not any(one.startswith(digest) for one in possible | member.live):
            raise WrongVersionError(f"{member.name} answered as {digest}, not as {possible}")
        return json.dumps(answer["choices"])

    async def _post(self, path: str, body: dict[str, object]) -> str:
        status, text = await post(self.origin, path, body)
        if status != 200:
            raise RefusedError(f"{path}: {status} {text}")
        return text


def random_prompt(rng: Random, length: int = 32) -> list[int]:
    return [rng.randrange(3, 700) for _ in range(length)]
