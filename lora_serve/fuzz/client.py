"""Sends one request over HTTP and keeps the outcome, whatever it is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence

from lora_serve.bench.http_stream import HttpFault, Origin, Response, request
from lora_serve.fuzz.answers import Called, Heard
from lora_serve.fuzz.talk_answers import add_document

REQUEST_ID_HEADER = "X-Request-Id"
PATIENCE_SECONDS = 300.0  # an answer that is not there by then counts as lost


class FuzzClient:
    """One server; many tasks may ask it at once."""

    def __init__(self, origin: Origin, api_keys: Sequence[str] = ()) -> None:
        """api_keys: those that requests name by their place; calls are made with the first."""
        self._origin = origin
        json_type = {"Content-Type": "application/json"}
        headers = [{**json_type, "Authorization": f"Bearer {key}"} for key in api_keys]
        self._headers = headers or [json_type]

    @property
    def num_api_keys(self) -> int:
        """How many callers it can be, at least one."""
        return len(self._headers)

    async def ask(
        self,
        path: str,
        body: Mapping[str, object],
        *,
        api_key: int = 0,
        request_id: str = "",
        leaves_after_tokens: int | None = None,
        leaves_after_seconds: float | None = None,
    ) -> Heard:
        """The answer to a body that may ask for a stream, up to where the caller leaves.

        request_id: names the request for calls about it; the server chooses an id if it is "".
        """
        heard = Heard(time.monotonic())
        headers = dict(self._headers[api_key])
        if request_id:
            headers[REQUEST_ID_HEADER] = request_id
        data = json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(leaves_after_seconds or PATIENCE_SECONDS),
                request(self._origin, "POST", path, headers, data) as response,
            ):
                await _hear(response, heard, bool(body.get("stream")), leaves_after_tokens)
        except TimeoutError:
            heard.has_left = leaves_after_seconds is not None
            heard.message = "no answer came"
        except (OSError, HttpFault, ValueError, LookupError) as error:
            heard.status, heard.message = 0, f"{type(error).__name__}: {error}"
        heard.end = time.monotonic()
        return heard

    async def call(self, path: str, body: Mapping[str, object]) -> Called:
        begin = time.monotonic()
        status, message = await self._text("POST", path, json.dumps(body).encode())
        return Called(begin, time.monotonic(), status, message)

    async def metrics(self) -> dict[str, float]:
        """The server's metrics by name, summed over labels."""
        status, text = await self._text("GET", "/metrics")
        if status != 200:
            raise HttpFault(f"/metrics: {status}: {text}")
        sums: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.partition(" ") if "{" not in line else _labelled(line)
                sums[name] = sums.get(name, 0.0) + float(value.split()[0])
        return sums

    async def _text(self, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
        """Status and body; status 0 if there is no answer."""
        try:
            async with (
                asyncio.timeout(PATIENCE_SECONDS),
                request(self._origin, method, path, self._headers[0], body) as response,
            ):
                return response.status, (await response.read()).decode()
        except (OSError, HttpFault, TimeoutError) as error:
            return 0, f"{type(error).__name__}: {error}"


async def _hear(
    response: Response, heard: Heard, is_streamed: bool, leaves_after_tokens: int | None
) -> None:
    heard.status = response.status
    if not is_streamed or response.status != 200:
        add_document(heard, json.loads(await response.read()))
        heard.is_whole = heard.status == 200
        return
    num_events = 0
    async for data in response.events():
        num_events += 1
        if data == b"[DONE]" or add_document(heard, json.loads(data)):
            heard.is_whole = heard.status == 200
            return
        num_told = heard.num_tokens or num_events
        if leaves_after_tokens is not None and num_told >= leaves_after_tokens:
            heard.has_left = True
            return
    raise HttpFault("the stream ended without [DONE]")


def _labelled(line: str) -> tuple[str, str, str]:
    name, _, rest = line.partition("{")
    return name, "", rest.rpartition("}")[2].strip()
