from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import pytest
from pydantic import BaseModel, PlainValidator
from starlette.requests import Request

from lora_serve.config import ServerConfig
from lora_serve.errors import OverloadedError
from lora_serve.server.http.auth import Caller
from lora_serve.server.http.body import SMALL_BODY_BYTES, BodyReader
from tests.fakes.engine import FakeEngine, fake_config
from tests.server.clients import client_for, error_of

URL = "/v1/completions"


async def refused(client: httpx.AsyncClient, **body: object) -> dict:
    return error_of(await client.post(URL, json={"prompt": "hi", **body}), 400)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", "5", 'max_tokens: must be an integer, got "5"'),
        ("max_tokens", 1.5, "max_tokens: must be an integer, got 1.5"),
        ("max_tokens", True, "max_tokens: must be an integer, got true"),
        ("temperature", "hot", 'temperature: must be a number, got "hot"'),
        ("temperature", [1], "temperature: must be a number, got a list of 1"),
        ("seed", 2**63, f"seed: must be at most {2**63 - 1}, got {2**63}"),
        ("stop", 5, "stop: must be a string or a list of strings, got 5"),
        (
            "stop",
            ["a", 5],
            "stop: must be a string or a list of strings, which 5 is not (item 1), got a list of 2",
        ),
        ("stream", "yes", 'stream: must be true or false, got "yes"'),
        ("prompt", 5, "prompt: must be a text, a list of token ids, or a list of either, got 5"),
        (
            "prompt",
            ["a", 5],
            "prompt: must be a list of texts or of lists of token ids, got a list of 2",
        ),
        (
            "prompt",
            [5, 2**40],
            f"prompt: has token id {2**40}, which is out of vocabulary: ids are in [0, 2147483647]",
        ),
        ("prompt", [-1], "prompt: has token id -1, which is out of vocabulary: ids are in"),
        (
            "logit_bias",
            {"a": 1, "7": 1, "b": 1},
            "logit_bias: has the keys 'a', 'b', which are no token ids, "
            'got {"a": 1, "7": 1, "b": 1}',
        ),
        (
            "logit_bias",
            {"5": "x"},
            'logit_bias: has no number as the bias of token 5, got {"5": "x"}',
        ),
        (
            "logit_bias",
            {"5": {"x" * 2_000_000: None}},
            'logit_bias: has no number as the bias of token 5, got {"5": {"' + "x" * 72 + "…",
        ),
        ("logit_bias", [1], "logit_bias: must be an object of token ids and their biases"),
        (
            "stop_token_ids",
            [1.5],
            "stop_token_ids: must be a list of token ids, which 1.5 is not (item 0), got a list of",
        ),
        (
            "allowed_token_ids",
            [5, True],
            "allowed_token_ids: must be a list of token ids, which true is not (item 1), got a",
        ),
        ("bad_words", [[]], "bad_words: must be a string or a list of strings, which a list of 0"),
        ("cache_salt", 5, "cache_salt: must be a non-empty string, got 5"),
        ("model", 5, "model: must be a string, got 5"),
        ("model", "x" * 1025, "model: must have at most 1024 characters"),
        ("request_id", "x" * 257, "request_id: must have at most 256 characters"),
    ],
)
async def test_a_wrong_type_is_named_with_its_value(
    client: httpx.AsyncClient, field: str, value: object, message: str
) -> None:
    error = await refused(client, **{field: value})
    assert error["message"].startswith(message)
    assert error["param"] == field


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty"])
async def test_what_is_not_finite_is_no_number(
    client: httpx.AsyncClient, field: str, number: str
) -> None:
    content = f'{{"prompt": "hi", "{field}": {number}}}'
    headers = {"Content-Type": "application/json"}
    error = error_of(await client.post(URL, content=content, headers=headers), 400)
    assert f"{field}: must be a finite number" in error["message"]


async def test_a_bias_must_be_finite_too(client: httpx.AsyncClient) -> None:
    for number in ("NaN", "1e999", "9" * 400):
        content = f'{{"prompt": "hi", "logit_bias": {{"5": {number}}}}}'
        headers = {"Content-Type": "application/json"}
        error = error_of(await client.post(URL, content=content, headers=headers), 400)
        assert "no finite number as the bias of token 5" in error["message"]


async def test_all_faults_are_told_at_once(client: httpx.AsyncClient) -> None:
    error = await refused(client, n="x", seed="y", foo=1, stream_options={"bar": 2})
    for words in ("n: must", "seed: must", "`foo`", "`stream_options.bar`"):
        assert words in error["message"]


async def test_many_faults_are_counted_and_not_listed(client: httpx.AsyncClient) -> None:
    error = await refused(client, **{f"field{number}": 1 for number in range(50)})
    assert error["message"].endswith("and 40 more")
    error = await refused(client, **{f"field{number}": 1 for number in range(2000)})
    assert error["message"] == "the body has 2000 faults"


async def test_a_long_value_is_cut(client: httpx.AsyncClient) -> None:
    error = await refused(client, n="x" * 100_000)
    assert len(error["message"]) < 200


async def test_null_means_not_given(client: httpx.AsyncClient) -> None:
    fields = (
        *("model", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream"),
        *("logit_bias", "logprobs", "echo", "stream_options", "cache_salt", "prompt_embeds"),
        *("stop_token_ids", "presence_penalty", "user", "suffix", "priority"),
    )
    body = {"prompt": "hi", **dict.fromkeys(fields)}
    assert (await client.post(URL, json=body)).status_code == 200


async def test_unknown_fields_can_be_ignored(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(ignore_unknown_fields=True)) as client:
        body = {"prompt": "hi", "foo": 1, "stream": True, "stream_options": {"bar": 1}}
        assert (await client.post(URL, json=body)).status_code == 200


async def test_a_charset_does_not_matter(client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    content = json.dumps({"prompt": "hi"})
    assert (await client.post(URL, content=content, headers=headers)).status_code == 200


async def test_a_body_that_says_it_is_too_large_is_not_read(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(max_body_bytes=1000)) as client:
        for url in (URL, "/v1/load_lora_adapter", "/tokenize", "/reset_prefix_cache"):
            error = error_of(await client.post(url, json={"prompt": "x" * 1000}), 413)
            assert error["message"].startswith("the request body is larger than 1000 bytes")
            assert "--max-body-bytes" in error["message"]
        body = {"prompt": "hi", "user": "x" * 900}
        assert (await client.post(URL, json=body)).status_code == 200


async def test_a_body_of_unknown_size_is_read_no_further_than_allowed(engine: FakeEngine) -> None:
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b" " * 100

    async with client_for(engine, ServerConfig(max_body_bytes=1000)) as client:
        headers = {"Content-Type": "application/json"}
        error_of(await client.post(URL, content=endless(), headers=headers), 413)
    assert num_sent < 20


class Threads(BaseModel):
    """Holds the thread that parsed it."""

    field: Annotated[threading.Thread, PlainValidator(lambda _: threading.current_thread())]


def request_of(*chunks: bytes, more: asyncio.Event | None = None, key: str = "") -> Request:
    """A request of this key. Its body comes in these chunks, the last once `more` is set."""
    left = list(chunks)

    async def receive() -> dict[str, object]:
        if len(left) == 1 and more is not None:
            await more.wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(sum(map(len, chunks))).encode()),
    ]
    caller = Caller(key or None, is_admin=False)
    return Request({"type": "http", "headers": headers, "state": {"caller": caller}}, receive)


def padded(num_bytes: int) -> bytes:
    return b'{"field": 1' + b" " * (num_bytes - 12) + b"}"


async def test_a_large_body_is_parsed_beside_the_event_loop() -> None:
    reader = BodyReader(ServerConfig())
    for num_bytes, is_beside in ((SMALL_BODY_BYTES, False), (SMALL_BODY_BYTES + 1, True)):
        body = await reader.read(request_of(padded(num_bytes)), Threads)
        assert (body.field is not threading.current_thread()) == is_beside


async def test_a_small_body_of_many_lists_is_parsed_beside_the_event_loop_too() -> None:
    reader = BodyReader(ServerConfig(ignore_unknown_fields=True))
    for num_lists, is_beside in ((1000, False), (1100, True)):
        data = b'{"field": 1, "more": [%b]}' % b",".join([b"[]"] * num_lists)
        body = await reader.read(request_of(data), Threads)
        assert (body.field is not threading.current_thread()) == is_beside


async def test_bodies_are_held_within_a_total_and_small_ones_beside_it() -> None:
    size = 100_000
    reader = BodyReader(ServerConfig(max_total_body_bytes=2 * size))
    more = asyncio.Event()
    first = [
        asyncio.create_task(reader.read(request_of(padded(size)[:-1], b"}", more=more), Threads))
        for _ in range(2)
    ]
    third = asyncio.create_task(reader.read(request_of(padded(size)), Threads))
    await asyncio.sleep(0.01)
    await reader.read(request_of(padded(SMALL_BODY_BYTES)), Threads)
    assert not third.done()
    more.set()
    await asyncio.gather(*first, third)


async def test_a_body_that_has_begun_waits_for_none_that_came_later() -> None:
    size = 100_000
    reader = BodyReader(ServerConfig(max_total_body_bytes=size + 10), wait_seconds=0.2)
    more = asyncio.Event()
    first = asyncio.create_task(
        reader.read(request_of(padded(size)[:-1], b"}", more=more), Threads)
    )
    await asyncio.sleep(0)
    second = asyncio.create_task(reader.read(request_of(padded(size)), Threads))
    await asyncio.sleep(0)
    more.set()
    await asyncio.gather(first, second)


async def test_a_body_that_finds_no_room_is_refused_and_may_be_sent_again() -> None:
    size = 100_000
    reader = BodyReader(ServerConfig(max_total_body_bytes=size), wait_seconds=0.01)
    more = asyncio.Event()
    slow = asyncio.create_task(reader.read(request_of(padded(size)[:-1], b"}", more=more), Threads))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match=r"100000 bytes .*--max-total-body-bytes"):
        await reader.read(request_of(padded(size)), Threads)
    more.set()
    await slow
    await reader.read(request_of(padded(size)), Threads)


async def test_only_a_body_with_embeddings_may_be_larger(engine: FakeEngine) -> None:
    config = ServerConfig(max_body_bytes=1000, max_embeds_body_bytes=2000)
    body = {"prompt": "hi", "user": "x" * 1500}
    with_embeds = FakeEngine(fake_config(enable_prompt_embeds=True))
    async with client_for(engine, config) as client:
        error = error_of(await client.post(URL, json={**body, "prompt_embeds": []}), 413)
        assert "--max-body-bytes" in error["message"]
    async with client_for(with_embeds, config) as client:
        assert (await client.post(URL, json={**body, "prompt_embeds": []})).status_code == 200
        error = error_of(await client.post(URL, json=body), 413)
        assert "no prompt_embeds" in error["message"]
        error_of(await client.post("/tokenize", json=body), 413)
        error = error_of(await client.post(URL, json={**body, "suffix": "x" * 2000}), 413)
        assert "--max-embeds-body-bytes" in error["message"]


async def test_prompts_are_counted_before_they_are_read(client: httpx.AsyncClient) -> None:
    error = await refused(client, prompt=[[1]] * 1025)
    assert "prompt: has 1025, at most 1024 prompts are allowed" in error["message"]


async def test_messages_and_their_parts_are_counted(client: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": "x"}
    url = "/v1/chat/completions"
    error = error_of(await client.post(url, json={"messages": [message] * 4097}), 400)
    assert "at most 4096 items" in error["message"]
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}
    error = error_of(await client.post(url, json={"messages": [parts]}), 400)
    assert "has 1025 parts, at most 1024 are allowed" in error["message"]
