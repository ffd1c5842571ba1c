"""Bodies that no client should send, how each must be answered, and clients that hardly read."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import time
from dataclasses import dataclass

import torch

from benchmarks.soak.samples import get
from lora_serve.bench.http_stream import Origin, request

# Long enough not to fit the buffers that the kernel keeps for a connection.
SLOW_READER_ID = "slow" * 64
SLOW_READER: dict[str, object] = {
    "prompt": [5] * 20,
    "max_tokens": 600,
    "n": 5,
    "temperature": 1,
    "seed": 1,
    "ignore_eos": True,
    "logprobs": 20,
    "stream": True,
    "request_id": SLOW_READER_ID,
}
SMALL_BUFFER = 4096
LAST_BYTES = 8192
LOOK_SECONDS = 0.5
REST_SECONDS = 30.0  # for what the buffers still hold


@dataclass(frozen=True, slots=True)
class HostileBody:
    """statuses: of the answers that it may get."""

    title: str
    path: str
    body: bytes
    statuses: tuple[int, ...] = (400,)

    async def send(self, origin: Origin) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        async with request(origin, "POST", self.path, headers, self.body) as response:
            return response.status, (await response.read()).decode()


async def read_slowly(origin: Origin, seconds: float) -> tuple[int, str]:
    """Ask for a long stream and leave it unread until the server is done with it.

    seconds: after which it is read all the same.

    Returns:
        The status, 0 if the connection broke, and the last of what came.
    """
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (origin.host, origin.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=SMALL_BUFFER)
    body = json.dumps(SLOW_READER).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {origin.host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    status, end = 0, b""
    try:
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        if status == 200:
            await _until_done_with(origin, seconds)
        async with asyncio.timeout(REST_SECONDS):
            while piece := await reader.read(2**16):
                end = end[-LAST_BYTES:] + piece
    except (OSError, ValueError, IndexError, TimeoutError):
        pass  # the engine was killed, or the answer is not over yet
    finally:
        writer.close()
    return status, end.decode(errors="replace")


async def _until_done_with(origin: Origin, seconds: float) -> None:
    """Wait until no slow reader's request is in flight, or for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(LOOK_SECONDS)
        listed = await get(origin, "/v1/requests?limit=1000")
        if listed and SLOW_READER_ID not in listed:
            return


def _completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 1} | fields).encode()


def _sparse_embeds() -> str:
    """1.5 kB that would be 4 TiB of rows."""
    place = torch.zeros(2, 1, dtype=torch.int64)
    rows = torch.sparse_coo_tensor(place, torch.ones(1), (2**30, 1024), check_invariants=True)
    file = io.BytesIO()
    torch.save(rows, file)
    return base64.b64encode(file.getvalue()).decode()


def _nested_tag() -> bytes:
    """A structural tag within a tag, and so on."""
    tag: dict[str, object] = {"type": "any_text"}
    for _ in range(500):
        tag = {"type": "tag", "begin": "<", "content": tag, "end": ">"}
    return _completion(response_format={"type": "structural_tag", "format": tag})


def _tensors(payload: bytes) -> bytes:
    """An adapter in a body."""
    texts = [base64.b64encode(payload).decode()]
    body = {"lora_name": "ghost", "config_dict": {}, "serialized_named_tensors": texts}
    return json.dumps(body).encode()


HOSTILE_BODIES = (
    HostileBody("no JSON", "/v1/completions", b'{"prompt": "x'),
    HostileBody("JSON that is no object", "/v1/completions", b"[1, 2, 3]"),
    HostileBody("nesting without end", "/v1/completions", b'{"prompt": ' + b"[" * 20_000),
    HostileBody("a token beyond the vocabulary", "/v1/completions", _completion(prompt=[10**9])),
    HostileBody("a negative token", "/v1/completions", _completion(prompt=[-1])),
    HostileBody("an empty prompt", "/v1/completions", _completion(prompt=[])),
    HostileBody("an answer that can never fit", "/v1/completions", _completion(max_tokens=10**9)),
    HostileBody("ten billion choices", "/v1/completions", _completion(n=10**10)),
    HostileBody("infinite heat", "/v1/completions", b'{"prompt": "x", "temperature": 1e999}'),
    HostileBody("a number as text", "/v1/completions", _completion(max_tokens="1")),
    HostileBody("an unknown field", "/v1/completions", _completion(surprise=1)),
    HostileBody("an unknown model", "/v1/completions", _completion(model="nobody"), (404,)),
    HostileBody("embeds that are no base64", "/v1/completions",
                b'{"prompt_embeds": "%%%", "max_tokens": 1}'),
    HostileBody("embeds that would fill the memory", "/v1/completions",
                json.dumps({"prompt_embeds": _sparse_embeds(), "max_tokens": 1}).encode()),
    HostileBody("no messages", "/v1/chat/completions", b'{"messages": []}'),
    HostileBody("a chat with a strange role", "/v1/chat/completions",
                b'{"messages": [{"role": 7, "content": "x"}]}'),
    HostileBody("an adapter from nowhere", "/v1/load_lora_adapter",
                b'{"lora_name": "ghost", "lora_path": "/nowhere"}', (404,)),
    HostileBody("an adapter that is a device", "/v1/load_lora_adapter",
                b'{"lora_name": "ghost", "lora_path": "/dev"}', (400, 404)),
    HostileBody("unloading an unknown name", "/v1/unload_lora_adapter", b'{"lora_name": "ghost"}',
                (404,)),
    HostileBody("a tag in a tag, 500 times", "/v1/completions", _nested_tag()),
    HostileBody("more stop strings than there may be", "/v1/completions",
                _completion(stop=["x"] * 17)),
    HostileBody("bad words without end", "/v1/completions", _completion(bad_words=["x" * 5000])),
    HostileBody("choices times logprobs", "/v1/completions",
                _completion(n=128, logprobs=20, max_tokens=900)),
    HostileBody("a template that loops", "/v1/chat/completions",
                b'{"messages": [{"role": "user", "content": "x"}], "chat_template": '
                b'"{% for i in range(99999) %}{{ i * messages[0].content }}{% endfor %}"}'),
    HostileBody("an answer to what was never answered", "/v1/responses",
                b'{"input": "x", "previous_response_id": "nobody"}', (404,)),
    HostileBody("an adapter that is a pickle", "/load_lora_adapter_from_tensors",
                _tensors(b"\x80\x04cos\nsystem\n")),
    HostileBody("an adapter that declares a terabyte", "/load_lora_adapter_from_tensors",
                _tensors(b'\x4e\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1099511627776],'
                         b'"data_offsets":[0,4398046511104]}}')),
    HostileBody("a deleted token", "/detokenize", b'{"tokens": [1000000000]}'),
)  # fmt: skip
