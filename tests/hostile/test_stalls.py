"""The worst body of each route, over a socket: none keeps the event loop from the others for long.

The loop answers all clients, so what one body takes of it in one piece is what they all wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from tests.fakes.engine import FakeEngine
from tests.hostile.test_bodies import SOUND
from tests.server.clients import serving

LONGEST_STALL_SECONDS = 1.0  # of CPU time, also on a slow machine
NUM_TRIES = 3
TEXT, IDS = "x" * 500, [97] * 480

WORST: list[tuple[str, dict[str, object]]] = [
    ("/v1/completions", {"prompt": IDS, "n": 49, "echo": True, "logprobs": 20, "max_tokens": 1}),
    ("/v1/completions", {"prompt": IDS, "n": 51, "prompt_logprobs": 20, "max_tokens": 1}),
    ("/v1/completions", {"prompt": [[97]] * 256, "max_tokens": 20, "logprobs": 5}),
    (
        "/v1/completions",
        {"prompt": IDS, "n": 49, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": TEXT[:200]}],
            "n": 128,
            "logprobs": True,
            "top_logprobs": 20,
            "max_tokens": 100,
        },
    ),
    ("/v1/embeddings", {"input": [[97]] * 2048}),
    ("/v1/embeddings", {"input": [TEXT] * 2048, "encoding_format": "base64"}),
    ("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    ("/detokenize", {"tokens": [97] * 2**17}),
]
# Of any route: lists, strings, keys and numbers, below and above the size that is parsed aside.
FILLED = [
    (url, b'{"user":[' + item * (size // len(item)) + b"0]}")
    for url in sorted({url for url, _ in SOUND})
    for item in (b"[],", b'"",', b'{"a":1},', b"1,")
    for size in (2**16 - 100, 2**20)
]


@contextlib.asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """The event loop's CPU seconds between two turns of this task, while this lasts.

    CPU time, and not the time that passes: other processes of the machine take none of it.
    """
    spent: list[float] = []

    async def watch() -> None:
        while True:
            begin = time.thread_time()
            try:
                await asyncio.sleep(0.005)
            finally:  # also of the turn in which the watch ends
                spent.append(time.thread_time() - begin)

    task = asyncio.create_task(watch())
    try:
        yield spent
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _post(url: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(url, content=content, headers=headers, timeout=60)


async def assert_no_stall(ask: Callable[[], Awaitable[object]], longest: float) -> None:
    """No turn of the loop takes as many seconds while this is asked, in one of the tries.

    A body that holds the loop does so each time; a host that takes the core away does not. The
    garbage collector walks over no object of other tests, as it walks over none of a server's
    start.
    """
    gc.collect()
    gc.freeze()
    stalls: list[float] = []
    while len(stalls) < NUM_TRIES and min(stalls, default=math.inf) >= longest:
        async with watched_loop() as spent:
            await ask()
        stalls.append(max(spent))
    assert min(stalls) < longest, stalls


@pytest.mark.parametrize(("url", "body"), WORST)
async def test_no_answer_holds_the_event_loop(
    engine: FakeEngine, url: str, body: dict[str, object]
) -> None:
    async with serving(engine) as server, httpx.AsyncClient(base_url=server, timeout=60) as client:

        async def ask() -> None:
            response = await client.post(url, json=body)
            assert response.status_code == 200, response.text

        await assert_no_stall(ask, LONGEST_STALL_SECONDS)


async def test_a_large_body_is_put_together_beside_the_event_loop(engine: FakeEngine) -> None:
    """A copy of 32 MiB is the least that is done to them: no turn of the loop may take as long."""
    chunks = [b" " * 2**16] * 512
    content = b"".join([b'{"lora_name": "a"}', *chunks])
    copies = []
    for _ in range(3):
        begin = time.thread_time()
        b"".join(chunks)
        copies.append(time.thread_time() - begin)
    headers = {"Content-Type": "application/json"}
    async with serving(engine) as server:
        url = f"{server}/load_lora_adapter_from_tensors"

        async def ask() -> None:
            response = await asyncio.to_thread(_post, url, content, headers)
            assert response.status_code == 400, response.text

        await assert_no_stall(ask, min(copies))


async def test_no_body_holds_the_event_loop(engine: FakeEngine) -> None:
    headers = {"Content-Type": "application/json"}
    async with serving(engine) as server, httpx.AsyncClient(base_url=server, timeout=60) as client:

        async def ask() -> None:
            for url, content in FILLED:
                response = await client.post(url, content=content, headers=headers)
                assert response.status_code in (200, 400, 404, 413), (url, content[:30])

        await assert_no_stall(ask, LONGEST_STALL_SECONDS)
