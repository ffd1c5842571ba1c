from __future__ import annotations

import base64
import re
from array import array
from typing import Any

import httpx
import pytest

from lora_serve.pooling import PoolingParams
from tests.fakes.engine import FakeEngine
from tests.server.clients import error_of

TEXTS = ["hi", "abc"]


async def embedded(client: httpx.AsyncClient, **body: object) -> Any:
    response = await client.post("/v2/embed", json={"texts": TEXTS, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_texts_have_the_embeddings_that_they_have_elsewhere(
    client: httpx.AsyncClient,
) -> None:
    there = (await client.post("/v1/embeddings", json={"input": TEXTS})).json()
    answer = await embedded(client, request_id="mine", input_type=None)
    assert answer == {
        "id": "embd-mine",
        "embeddings": {"float": [item["embedding"] for item in there["data"]]},
        "texts": TEXTS,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {
                "input_tokens": there["usage"]["prompt_tokens"],
                "image_tokens": 0,
            },
        },
        "response_type": "embeddings_by_type",
        "system_fingerprint": there["system_fingerprint"],
    }


async def test_one_embedding_is_told_in_several_forms(client: httpx.AsyncClient) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    told = (await embedded(client, embedding_types=types))["embeddings"]
    assert sorted(told) == sorted(types)
    for index, values in enumerate(told["float"]):
        assert array("f", base64.b64decode(told["base64"][index])).tolist() == values
        bits = int("".join("1" if value >= 0 else "0" for value in values), 2)
        assert told["ubinary"][index] == [bits]
        assert told["binary"][index] == [bits - 128]
    alone = (await embedded(client, embedding_types=["base64"]))["embeddings"]
    assert alone == {"base64": told["base64"]}


async def test_long_texts_lose_their_end_or_their_beginning(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    for cut, kept in (({}, 2), ({"truncate": "END"}, 2), ({"truncate": "START"}, 2)):
        answer = await embedded(client, texts=["abcd"], max_tokens=2, **cut)
        assert answer["meta"]["billed_units"]["input_tokens"] == kept
    whole = (await client.post("/tokenize", json={"prompt": "abcd"})).json()["tokens"]
    assert [list(request.prompt.token_ids) for request in engine.seen] == [
        whole[:2],
        whole[:2],
        whole[-2:],
    ]
    longest = engine.model_info.max_model_len
    for most in ({}, {"max_tokens": 2**31 - 1}):
        answer = await embedded(client, texts=["a" * 2 * longest], **most)
        assert answer["meta"]["billed_units"]["input_tokens"] == longest


async def test_the_servers_pooling_holds_and_dimensions_are_the_bodys(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.pooling_defaults = PoolingParams(pooling_type="MEAN", normalize=False)
    await embedded(client, output_dimension=2, cache_salt="s", priority=3)
    assert {request.pooling for request in engine.seen} == {
        PoolingParams(pooling_type="MEAN", normalize=False, dimensions=2)
    }
    assert {request.priority for request in engine.seen} == {3}


@pytest.mark.parametrize(
    ("wrong", "message", "param"),
    [
        ({"texts": None}, "texts: must be a list, got null", "texts"),
        ({"texts": []}, "texts: must have at least 1 item, got a list of 0", "texts"),
        (
            {"texts": ["a"] * 2049},
            "texts: must have at most 2048 items, got a list of 2049",
            "texts",
        ),
        ({"input_type": "query"}, "Unsupported input_type 'query'. No prompts", "input_type"),
        ({"images": ["data:"]}, "images: is not supported by this server", "images"),
        ({"inputs": [{"content": []}]}, "inputs: is not supported", "inputs"),
        ({"embedding_types": ["int8"]}, "must be 'float', 'base64'", "embedding_types[0]"),
        ({"output_dimension": 9}, "output_dimension must be in [1, 8], the", "output_dimension"),
        (
            {"output_dimension": 7, "embedding_types": ["binary"]},
            "output_dimension 7 is no multiple of 8",
            "output_dimension",
        ),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0", "max_tokens"),
        (
            {"texts": ["abcd"], "max_tokens": 2, "truncate": "NONE"},
            "texts 0 has 5 tokens, max_tokens is 2; shorten it, raise max_tokens, or let truncate",
            "texts",
        ),
        ({"texts": ["a" * 3000], "truncate": "NONE"}, "the prompt's length is 3001", "texts"),
        ({"truncate": "MIDDLE"}, "truncate: must be 'NONE', 'START' or 'END'", "truncate"),
    ],
)
async def test_wrong_bodies_are_refused_by_the_names_that_they_have(
    client: httpx.AsyncClient, wrong: dict[str, object], message: str, param: str
) -> None:
    response = await client.post("/v2/embed", json={"texts": TEXTS, **wrong})
    error = error_of(response, 400)
    assert re.search(re.escape(message), error["message"]), error
    assert error["param"] == param
