"""Asks one question over HTTP and keeps what was heard, whole or in pieces, whatever becomes of it.

Floats are kept as JSON had them, which is to the bit. Knows nothing of what is right.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.questions import Question
from lora_serve.bench.http_stream import HttpFault, Origin, Response, request

PATIENCE_SECONDS = 300.0  # others may measure meanwhile
NO_ANSWER = 0  # instead of a status: the connection broke, or nothing came


@dataclass(slots=True)
class Choice:
    """versions: the weights that answered, as system_fingerprint named them."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: object = None
    versions: set[str] = field(default_factory=set)

    def add(self, piece: dict[str, Any]) -> None:
        """One choice of an answer, or of a chunk of either kind."""
        message = piece.get("message") or piece.get("delta") or {}
        self.text += piece.get("text") or message.get("content") or ""
        self.token_ids.extend(piece.get("token_ids") or ())
        self.logprobs.extend(_logprobs(piece.get("logprobs")))
        self.finish_reason = piece.get("finish_reason") or self.finish_reason
        self.stop_reason = piece.get("stop_reason") or self.stop_reason

    def is_start_of(self, whole: Choice) -> bool:
        return (
            whole.text.startswith(self.text)
            and whole.token_ids[: len(self.token_ids)] == self.token_ids
            and whole.logprobs[: len(self.logprobs)] == self.logprobs
        )

    def equals(self, other: Choice) -> bool:
        return (
            self.text == other.text
            and self.token_ids == other.token_ids
            and self.logprobs == other.logprobs
            and self.finish_reason == other.finish_reason
            and self.stop_reason == other.stop_reason
        )


@dataclass(slots=True)
class Heard:
    """What came of a question. status: of the answer, or of the error event that ended it.

    has_left: the client hung up. first_seconds: until the first piece, of those that came.
    """

    begin: float = field(default_factory=time.monotonic)
    end: float = 0.0
    status: int = NO_ANSWER
    message: str = ""
    has_left: bool = False
    first_seconds: float | None = None
    num_cached_tokens: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)

    def add(self, document: dict[str, Any]) -> None:
        """An answer, a chunk, or an error in either's place."""
        if "error" in document:
            error = document["error"]
            self.status, self.message = error["code"], error["message"]
            return
        if self.first_seconds is None:
            self.first_seconds = time.monotonic() - self.begin
        versions = {_version(one) for one in document["system_fingerprint"].split(",")}
        for piece in document["choices"]:
            choice = self.choices.setdefault(piece["index"], Choice())
            choice.add(piece)
            choice.versions |= versions
        if usage := document.get("usage"):
            self.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


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
    heard = Heard()
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


def _logprobs(logprobs: dict[str, Any] | None) -> list[object]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [list(row) for row in zip(*columns, strict=True)]


def _version(fingerprint: str) -> str:
    """The adapter's digest in a fingerprint, as MODEL-DIGEST-gN has it; empty for the base."""
    parts = fingerprint.split("-")
    return parts[1] if len(parts) > 1 else ""
