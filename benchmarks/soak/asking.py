"""Asks one question over HTTP and keeps what was heard, whole or in pieces, whatever happens."""

from __future__ import annotations

import asyncio
import json
import time

from benchmarks.soak.questions import Question
from lora_serve.bench.http_stream import HttpFault, Origin, Response, request
from lora_serve.fuzz.answers import Choice, Heard

PATIENCE_SECONDS = 300.0  # others may measure meanwhile
NO_ANSWER = 0  # instead of a status: the connection broke, or nothing came


async def ask(
    origin: Origin,
    question: Question,
    model: str,
    *,
    cache_salt: str = "",
    stream: bool = False,
    leave_after_tokens: int | None = None,
) -> Heard:
    """The answer, or what came of it. leave_after_tokens: hang up once so many have come."""
    heard = Heard(time.monotonic())
    body = json.dumps(question.body(model, cache_salt=cache_salt, stream=stream)).encode()
    headers = {"Content-Type": "application/json"}
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async with request(origin, "POST", question.path, headers, body) as response:
                heard.status = response.status
                if not stream or response.status != 200:
                    heard.add(json.loads(await response.read()))
                else:
                    await _listen(response, heard, leave_after_tokens)
    except (OSError, HttpFault, TimeoutError) as error:
        heard.status, heard.message = NO_ANSWER, f"{type(error).__name__}: {error}"
    heard.end = time.monotonic()
    return heard


async def _listen(response: Response, heard: Heard, leave_after_tokens: int | None) -> None:
    is_done = False
    async for data in response.events():
        if data == b"[DONE]":
            is_done = True
            continue
        heard.add(json.loads(data))
        if leave_after_tokens is not None and heard.num_tokens >= leave_after_tokens:
            heard.has_left = True
            return
    if not is_done:
        raise HttpFault("the stream ended without [DONE]")


def versions_of(choice: Choice) -> set[str]:
    """The digests of the adapters that gave it, as it claims; "" stands for the base model."""
    return {_digest(fingerprint) for fingerprint in choice.fingerprints}


def _digest(fingerprint: str) -> str:
    """The digest in MODEL-DIGEST-gN, as `system_fingerprint` has it."""
    parts = fingerprint.split("-")
    return parts[1] if len(parts) > 1 else ""
