"""One request against an OpenAI-compatible server, timed as its tokens arrive.

Prompts go out as token ids over /v1/completions, greedy, with `ignore_eos`, so that every server
computes the same work. A failed request is a record with an error, never an exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lora_serve.bench.http_stream import HttpFault, Origin, Response, request
from lora_serve.bench.workload import TimedRequest

JsonObject = Mapping[str, Any]  # a request body's fields, whatever a server's own are

# Has lora-serve and vLLM send every token when it is there; one without text waits for others else.
EVERY_TOKEN: JsonObject = {"return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server that requests go to, and how it wants them.

    extra_body: fields added to every request.
    adapter_fields: what asks for an adapter, by name; {"model": name} where it is not listed.
    timeout_seconds: an answer that is not complete by then has failed.
    """

    origin: Origin
    model: str
    api_key: str | None = None
    extra_body: JsonObject = field(default_factory=dict)
    adapter_fields: Mapping[str, JsonObject] = field(default_factory=dict)
    timeout_seconds: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def body(self, timed: TimedRequest) -> bytes:
        fields = {
            "model": self.model,
            "prompt": timed.prompt_token_ids,
            "max_tokens": timed.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra_body,
        }
        if timed.adapter is not None:
            fields |= self.adapter_fields.get(timed.adapter, {"model": timed.adapter})
        return msgspec.json.encode(fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The times of one request, in seconds; a failed one has an error and what came before it.

    late_seconds: how long after its time the request was sent.
    ttft_seconds: from sending to the first token. gaps_seconds: between its later arrivals.
    """

    adapter: str | None
    prompt_tokens: int
    late_seconds: float
    e2e_seconds: float
    ttft_seconds: float = 0.0
    gaps_seconds: tuple[float, ...] = ()
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of a token after the first; None if there was none."""
        if self.output_tokens < 2:
            return None
        return sum(self.gaps_seconds) / (self.output_tokens - 1)


async def send(endpoint: Endpoint, timed: TimedRequest, due: float) -> RequestRecord:
    """Send a request now and follow it to its end; `due` is its time on perf_counter's clock."""
    body = endpoint.body(timed)
    sent = time.perf_counter()
    answer = _Answer()
    error = None
    try:
        async with (
            asyncio.timeout(endpoint.timeout_seconds),
            request(endpoint.origin, "POST", "/v1/completions", endpoint.headers, body) as response,
        ):
            error = await answer.follow(response)
    except TimeoutError:
        error = f"not complete after {endpoint.timeout_seconds:g} s"
    except (OSError, HttpFault, msgspec.DecodeError) as fault:
        error = f"{type(fault).__name__}: {fault}"
    return RequestRecord(
        adapter=timed.adapter,
        prompt_tokens=len(timed.prompt_token_ids),
        late_seconds=sent - due,
        e2e_seconds=(answer.arrivals[-1] if answer.arrivals else time.perf_counter()) - sent,
        ttft_seconds=answer.arrivals[0] - sent if answer.arrivals else 0.0,
        gaps_seconds=answer.gaps(),
        output_tokens=answer.output_tokens or len(answer.arrivals),
        cached_tokens=answer.cached_tokens,
        text="".join(answer.texts),
        error=error if error or answer.arrivals else "no token came",
    )


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


class _Answer:
    """What has arrived of one answer."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.texts: list[str] = []
        self.output_tokens = 0
        self.cached_tokens = 0
        self._finished_at = 0.0

    def gaps(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False))

    async def follow(self, response: Response) -> str | None:
        """Read to the end; returns what went wrong, or None."""
        if response.status != 200:
            text = (await response.read()).decode(errors="replace")
            return f"HTTP {response.status}: {text[:300]}"
        finished = False
        async for data in response.events():
            now = time.perf_counter()
            if data == b"[DONE]":
                break
            event = msgspec.json.decode(data, type=_Event)
            if event.error is not None:
                return f"error event: {event.error}"
            finished |= self._take(event, now)
        if finished and self.output_tokens and not self.arrivals:
            # Its tokens have no text, such as special ones, so nothing but its end has come.
            self.arrivals.append(self._finished_at)
        return None if finished else "the stream ended before the answer did"

    def _take(self, event: _Event, now: float) -> bool:
        """Count what an event brings; returns whether it finishes the answer."""
        if event.usage:
            self.output_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            self.cached_tokens = (details and details.cached_tokens) or 0
        if not event.choices:
            return False
        choice = event.choices[0]
        # Some servers finish with a separate event: no text, so no token came with it.
        if choice.text or choice.token_ids or choice.finish_reason is None:
            self.arrivals.append(now)
            self.texts.append(choice.text)
        if choice.finish_reason is None:
            return False
        self._finished_at = now
        return True
