"""Streams completions and records what must be equal to the bit: tokens and their logprobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import httpx

TIMEOUT_SECONDS = 300.0
NUM_TOP = 3


@dataclass(frozen=True)
class Prompted:
    """One request: greedy, and through its max_tokens, whatever it says."""

    model: str
    token_ids: tuple[int, ...]
    max_tokens: int
    cache_salt: str = ""

    def body(self, *, stream: bool = True) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "prompt": list(self.token_ids),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": NUM_TOP,
            "return_token_ids": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        return body

    def salted(self, cache_salt: str) -> Prompted:
        return replace(self, cache_salt=cache_salt)


@dataclass
class Recorded:
    """Floats are as the JSON had them, which is to the bit. Unfinished if the client left."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    fingerprints: set[str] = field(default_factory=set)
    num_cached_tokens: int = -1
    is_finished: bool = False

    def add(self, chunk: dict[str, object]) -> None:
        self.fingerprints.add(str(chunk["system_fingerprint"]))
        choices, usage = chunk["choices"], chunk.get("usage")
        assert isinstance(choices, list)
        for choice in choices:
            self.token_ids.extend(choice["token_ids"])
            self.logprobs.extend(choice["logprobs"]["token_logprobs"])
            self.top_logprobs.extend(choice["logprobs"]["top_logprobs"])
            self.is_finished = self.is_finished or choice["finish_reason"] == "length"
        if isinstance(usage, dict):
            self.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    def is_start_of(self, whole: Recorded) -> bool:
        """Whether `whole` goes on as this began, in tokens and logprobs."""
        n = len(self.token_ids)
        return (
            self.token_ids == whole.token_ids[:n]
            and self.logprobs == whole.logprobs[:n]
            and self.top_logprobs == whole.top_logprobs[:n]
        )

    def equals(self, other: Recorded) -> bool:
        return self.is_finished and other.is_finished and self.is_start_of(other)


def client_for(base_url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_SECONDS, limits=limits)


async def record(
    http: httpx.AsyncClient,
    request: Prompted,
    *,
    on_token: Callable[[int], None] = lambda count: None,
) -> Recorded:
    """The whole answer. `on_token` hears how many tokens there are, after each chunk."""
    recorded = Recorded()
    async with http.stream("POST", "/v1/completions", json=request.body()) as response:
        async for chunk in chunks(response):
            recorded.add(chunk)
            on_token(len(recorded.token_ids))
    return recorded


async def record_until(http: httpx.AsyncClient, request: Prompted, seconds: float) -> Recorded:
    """What came until the client hung up."""
    recorded = Recorded()
    try:
        async with asyncio.timeout(seconds):
            async with http.stream("POST", "/v1/completions", json=request.body()) as response:
                async for chunk in chunks(response):
                    recorded.add(chunk)
    except TimeoutError:
        pass
    return recorded


async def record_alone(base_url: str, requests: list[Prompted]) -> list[Recorded]:
    """One after another and not streamed: nothing else is in the server."""
    recorded = [Recorded() for _ in requests]
    async with client_for(base_url) as http:
        for request, one in zip(requests, recorded, strict=True):
            response = await http.post("/v1/completions", json=request.body(stream=False))
            assert response.status_code == 200, response.text
            one.add(response.json())
    return recorded


async def record_together(base_url: str, requests: list[Prompted]) -> list[Recorded]:
    async with client_for(base_url) as http:
        return list(await asyncio.gather(*(record(http, request) for request in requests)))


async def chunks(response: httpx.Response) -> AsyncIterator[dict[str, object]]:
    """The stream's events, until [DONE]."""
    if response.status_code != 200:
        raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            yield chunk
