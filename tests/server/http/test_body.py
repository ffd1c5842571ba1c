from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from lora_serve.config import ServerConfig
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of

URL = "/v1/completions"


async def refused(client: httpx.AsyncClient, **body: object) -> dict:
    return error_of(await client.post(URL, json={"prompt": "hi", **body}), 400)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", "5", 'max_tokens: input should be a valid integer, got "5"'),
        ("max_tokens", 1.5, "max_tokens: input should be a valid integer, got 1.5"),
        ("max_tokens", True, "max_tokens: input should be a valid integer, got true"),
        ("temperature", "hot", 'temperature: input should be a valid number, got "hot"'),
        ("temperature", [1], "temperature: input should be a valid number, got a list of 1"),
        ("seed", 2**63, f"seed: input should be less than or equal to {2**63 - 1}, got {2**63}"),
        ("stop", 5, "stop: must be a string or a list of strings, got 5"),
        ("stop", ["a", 5], "stop: must be a string or a list of strings, got a list of 2"),
        ("stream", "yes", 'stream: input should be a valid boolean, got "yes"'),
        ("prompt", 5, "prompt: must be a text, a list of token ids, or a list of either, got 5"),
        (
            "prompt",
            ["a", 5],
            "prompt: must be a list of texts or of lists of token ids, got a list of 2",
        ),
        ("prompt", [2**40], "prompt: has a token id outside of [0, 2147483647], got a list of 1"),
        (
            "logit_bias",
            {"a": 1},
            "logit_bias: has the key 'a', which is no token id, got an object",
        ),
        (
            "logit_bias",
            {"5": "x"},
            "logit_bias: has no number as the bias of token 5, got an object",
        ),
        ("logit_bias", [1], "logit_bias: must be an object of token ids and their biases"),
        ("stop_token_ids", [1.5], "stop_token_ids: must be a list of token ids, got a list of 1"),
        ("cache_salt", 5, "cache_salt: must be a non-empty string, got 5"),
        ("model", 5, "model: input should be a valid string, got 5"),
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
    assert f"{field}: input should be a finite number" in error["message"]


async def test_a_bias_must_be_finite_too(client: httpx.AsyncClient) -> None:
    for number in ("NaN", "1e999", "9" * 400):
        content = f'{{"prompt": "hi", "logit_bias": {{"5": {number}}}}}'
        headers = {"Content-Type": "application/json"}
        error = error_of(await client.post(URL, content=content, headers=headers), 400)
        assert "no finite number as the bias of token 5" in error["message"]


async def test_all_faults_are_told_at_once(client: httpx.AsyncClient) -> None:
    error = await refused(client, n="x", seed="y", foo=1, stream_options={"bar": 2})
    for words in ("n: input", "seed: input", "`foo`", "`stream_options.bar`"):
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
