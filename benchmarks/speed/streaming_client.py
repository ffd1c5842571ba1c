"""The clients of benchmarks.speed.streaming: … streaming_client URL MODEL STREAMS TOKENS.

They ask all at once, each over a connection of its own, and print how many events came.
"""

from __future__ import annotations

import asyncio
import json
import sys

from lora_serve.bench.http_stream import Origin, request


def request_body(model: str, num_tokens: int) -> bytes:
    """The body that asks for one streamed completion."""
    settings = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    return json.dumps({"model": model, "prompt": [1, 2, 3], **settings}).encode()


async def num_events(origin: Origin, body: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    async with request(origin, "POST", "/v1/completions", headers, body) as response:
        assert response.status == 200, f"refused with {response.status}"
        return sum([data != b"[DONE]" async for data in response.events()])


async def main(url: str, model: str, num_streams: int, num_tokens: int) -> None:
    origin, body = Origin.parse(url), request_body(model, num_tokens)
    print(sum(await asyncio.gather(*(num_events(origin, body) for _ in range(num_streams)))))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
