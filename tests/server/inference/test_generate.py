from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import error_of, events

PROMPT = list(b"Hello")
URL = "/inference/v1/generate"


def body(**fields: object) -> dict[str, object]:
    params = {"max_tokens": 6, "temperature": 0, **fields.pop("params", {})}  # type: ignore[dict-item]
    return {"token_ids": PROMPT, "sampling_params": params, **fields}


async def test_tokens_come_back_for_tokens(client: httpx.AsyncClient) -> None:
    answer = (await client.post(URL, json=body(request_id="mine"))).json()
    assert answer["request_id"] == "generate-tokens-mine"
    assert answer["choices"] == [
        {
            "index": 0,
            "token_ids": list(b"You sa"),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["prompt_token_ids"] is None


async def test_the_same_as_a_completion_to_the_bit(client: httpx.AsyncClient) -> None:
    params = {"logprobs": 2, "prompt_logprobs": 1, "seed": 3, "n": 2, "temperature": 1}
    answer = (await client.post(URL, json=body(params=params, return_token_ids=True))).json()
    asked = {"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True, **params}
    completion = (await client.post("/v1/completions", json=asked)).json()
    assert answer["prompt_token_ids"] == PROMPT
    for mine, theirs in zip(answer["choices"], completion["choices"], strict=True):
        assert mine["token_ids"] == theirs["token_ids"]
        told = [position["logprob"] for position in mine["logprobs"]["content"]]
        assert told == theirs["logprobs"]["token_logprobs"]
        assert answer["prompt_logprobs"] == theirs["prompt_logprobs"]
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert first["top_logprobs"][0] == {k: first[k] for k in ("token_id", "logprob", "rank")}
    assert len(first["top_logprobs"]) == 3


async def test_a_stream_has_all_that_the_whole_has(client: httpx.AsyncClient) -> None:
    params = {"logprobs": 0}
    whole = (await client.post(URL, json=body(params=params))).json()
    options = {"include_usage": True}
    asked = body(params=params, stream=True, stream_options=options, return_token_ids=True)
    *chunks, last = events((await client.post(URL, json=asked)).text)
    tokens = [t for chunk in chunks for choice in chunk["choices"] for t in choice["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert [chunk["prompt_token_ids"] for chunk in chunks] == [PROMPT, *[None] * (len(chunks) - 1)]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]


async def test_texts_are_told_with_the_tokens_if_they_are_wanted(client: httpx.AsyncClient) -> None:
    params = {"n": 2, "stop": ["a"], "detokenize": None}
    whole = (await client.post(URL, json=body(params=params, output_mode="text"))).json()
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "n": 2, "stop": ["a"]}
    completion = (await client.post("/v1/completions", json=asked)).json()
    texts = [choice["text"] for choice in completion["choices"]]
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["output_mode"] == "text"
    streamed = body(params=params, output_mode="text", stream=True)
    chunks = events((await client.post(URL, json=streamed)).text)
    assert {chunk["output_mode"] for chunk in chunks} == {"text"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, text in enumerate(texts):
        assert "".join(each["text"] for each in choices if each["index"] == index) == text


async def test_it_may_grow_as_long_as_the_context_allows(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    await client.post(URL, json={"token_ids": PROMPT, "sampling_params": {}})
    assert engine.seen[-1].params.max_tokens == 512 - len(PROMPT)


async def test_an_adapter_answers_by_its_name(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    answer = (await client.post(URL, json=body(model="tenant", cache_salt="s"))).json()
    assert bytes(answer["choices"][0]["token_ids"]) == b"ALPHA:"
    assert answer["system_fingerprint"].endswith("-g0")
    assert engine.seen[-1].lora_name == "tenant"
    error_of(await client.post(URL, json=body(model="nobody")), 404)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": "Hello"}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [1] * 600}, "token_ids"),
        ({"params": {"top_p": 7}}, "sampling_params.top_p"),
        ({"params": {"top_p": "7"}}, "sampling_params.top_p"),
        ({"params": {"allowed_token_ids": [10**6]}}, "sampling_params.allowed_token_ids"),
        ({"params": {"colour": 1}}, "sampling_params.colour"),
        ({"params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"output_mode": "text", "params": {"detokenize": False}}, "output_mode"),
        ({"features": {"a": 1}}, "features"),
        ({"stream": True, "params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    error = error_of(await client.post(URL, json=body(**fields)), 400)
    assert error["param"] == param
    told = (param, "out of vocabulary", "the prompt's length is 600")
    assert any(words in error["message"] for words in told)
