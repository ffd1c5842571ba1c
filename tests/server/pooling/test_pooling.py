from __future__ import annotations

import base64
import math
import re
from array import array
from typing import Any

import httpx
import pytest

from lora_serve.pooling import PoolingParams
from lora_serve.server.openai import embeddings
from tests.fakes.engine import FakeEngine
from tests.server.clients import error_of

INPUT = {"input": ["hi", [98, 99]]}


async def pooled(client: httpx.AsyncClient, **body: object) -> Any:
    response = await client.post("/pooling", json={**INPUT, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text_has_the_embedding_that_it_has_elsewhere(client: httpx.AsyncClient) -> None:
    there = (await client.post("/v1/embeddings", json=INPUT)).json()
    for task in ({}, {"task": "embed"}):
        answer = await pooled(client, **task, request_id="mine")
        assert (answer["id"], answer["object"], answer["model"]) == (
            "pooling-mine",
            "list",
            "base/model",
        )
        assert [item["data"] for item in answer["data"]] == [
            item["embedding"] for item in there["data"]
        ]
        assert [item["object"] for item in answer["data"]] == ["pooling"] * 2
        assert answer["usage"]["prompt_tokens"] == there["usage"]["prompt_tokens"]


async def test_each_token_has_an_embedding(client: httpx.AsyncClient) -> None:
    data = (await pooled(client, task="token_embed"))["data"]
    assert [(len(item["data"]), len(item["data"][0])) for item in data] == [(3, 8), (2, 8)]
    assert math.hypot(*data[0]["data"][1]) == pytest.approx(1.0)
    coded = (await pooled(client, task="token_embed", encoding_format="base64"))["data"]
    for item, other in zip(data, coded, strict=True):
        flat = [value for row in item["data"] for value in row]
        assert array("f", base64.b64decode(other["data"])).tolist() == flat


async def test_tokens_are_pooled_as_the_body_and_the_server_say(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.pooling_defaults = PoolingParams(pooling_type="MEAN", normalize=False, dimensions=2)
    await pooled(client, task="token_embed", use_activation=True)
    assert engine.seen[0].pooling == PoolingParams(pooling_type="ALL", dimensions=2)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("classify", "Unsupported task: 'classify'.*no classifier head is served"),
        ("token_classify", "Unsupported task: 'token_classify'"),
        ("plugin", "No IOProcessor plugin installed"),
    ],
)
async def test_a_task_that_needs_another_model_is_refused(
    client: httpx.AsyncClient, task: str, told: str
) -> None:
    error = error_of(await client.post("/pooling", json={**INPUT, "task": task}), 400)
    assert re.match(told, str(error["message"]))
    assert (error["type"], error["param"]) == ("BadRequestError", "task")


async def test_an_answer_that_is_too_large_is_refused_before_it_is_computed(
    engine: FakeEngine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_FLOATS", 32)
    await pooled(client)
    response = await client.post("/pooling", json={**INPUT, "task": "token_embed"})
    error = error_of(response, 400)
    assert "5 tokens of inputs with 8 dimensions are 40 values" in str(error["message"])
    assert error["param"] == "input"
    assert len(engine.seen) == 2
    await pooled(client, task="token_embed", dimensions=6)


async def test_a_classifier_is_no_route_and_it_is_said_why(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post("/classify", json=INPUT), 404)
    assert "/classify: no classifier head is served" in str(error["message"])
