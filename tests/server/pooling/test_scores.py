from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from lora_serve.pooling import PoolingParams
from lora_serve.server.pooling.protocol import RerankBody, ScoreBody
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import BOS
from tests.server.clients import Json, error_of

DOCUMENTS = ["ab", "hi", "c", "ab"]


async def asked(client: httpx.AsyncClient, path: str, **body: object) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def scores(client: httpx.AsyncClient, **body: object) -> list[float]:
    return [item["score"] for item in (await asked(client, "/score", **body))["data"]]


async def test_a_score_is_the_cosine_between_two_embeddings(client: httpx.AsyncClient) -> None:
    embedded = await client.post("/v1/embeddings", json={"input": ["hi", *DOCUMENTS]})
    query, *documents = (item["embedding"] for item in embedded.json()["data"])
    answer = await asked(client, "/score", queries="hi", documents=DOCUMENTS, request_id="mine")
    told = [item["score"] for item in answer["data"]]
    cosines = [sum(a * b for a, b in zip(query, each, strict=True)) for each in documents]
    assert told == pytest.approx(cosines, abs=1e-6)
    assert told[1] == pytest.approx(1.0, abs=1e-15)
    assert (answer["id"], answer["object"]) == ("score-mine", "list")
    assert [(item["index"], item["object"]) for item in answer["data"]] == [
        (index, "score") for index in range(4)
    ]
    assert answer["usage"]["prompt_tokens"] == 3 + 3 + 3 + 2 + 3


async def test_pairs_have_four_kinds_of_names_and_texts_three_forms(
    client: httpx.AsyncClient,
) -> None:
    expected = await scores(client, queries=["hi", "c"], documents=["ab", "d"])
    assert expected == [
        (await scores(client, queries=query, documents=document))[0]
        for query, document in (("hi", "ab"), ("c", "d"))
    ]
    for names in (("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")):
        texts = (["hi", {"text": "c"}], [{"content": [{"type": "text", "text": "ab"}]}, "d"])
        assert await scores(client, **dict(zip(names, texts, strict=True))) == expected
    there = await asked(client, "/v1/score", queries=["hi", "c"], documents=["ab", "d"])
    assert [item["score"] for item in there["data"]] == expected


async def test_documents_are_ranked_by_their_scores(client: httpx.AsyncClient) -> None:
    told = await scores(client, queries="hi", documents=DOCUMENTS)
    body = {"query": "hi", "documents": DOCUMENTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = (await asked(client, path, **body))["results"]
        order = [item["index"] for item in results]
        assert order == sorted(range(4), key=lambda index: (-told[index], index))
        assert order[0] == 1
        assert [item["relevance_score"] for item in results] == [told[index] for index in order]
        assert [item["document"]["text"] for item in results] == [DOCUMENTS[i] for i in order]
    (first,) = (await asked(client, "/rerank", **body, top_n=1, return_documents=False))["results"]
    assert (first["index"], first["document"]) == (1, None)


async def test_the_servers_pooling_holds_and_lengths_do_not_matter(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.pooling_defaults = PoolingParams(pooling_type="MEAN", dimensions=3)
    await scores(client, queries="hi", documents="ab", use_activation=True)
    assert {request.pooling for request in engine.seen} == {
        PoolingParams(pooling_type="MEAN", dimensions=3, normalize=False)
    }


async def test_texts_are_cut_to_their_first_tokens(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    await scores(
        client, queries="abc", documents="defg", max_tokens_per_query=1, max_tokens_per_doc=2
    )
    await scores(client, queries="abc", documents="d", max_tokens_per_query=0)
    await scores(client, queries="abc", documents="d", truncate_prompt_tokens=2)
    seen = [request.prompt.token_ids for request in engine.seen]
    assert seen == [(BOS, 97), (BOS, 100, 101), (BOS, 97, 98, 99), (BOS, 100), (98, 99), (BOS, 100)]


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        ("/score", {}, "queries", "give texts in one pair of fields: .*got none"),
        ("/score", {"queries": "a"}, "queries", "got queries"),
        (
            "/score",
            {"queries": "a", "documents": "b", "text_1": "c"},
            "documents",
            "got documents, queries, text_1",
        ),
        (
            "/score",
            {"queries": ["a"] * 2, "documents": ["b"] * 3},
            "documents",
            "must be either 1:1, 1:N or N:N, got 2 queries and 3 documents",
        ),
        ("/score", {"queries": "a", "documents": ["b"] * 2048}, "documents", "at most 2048 toget"),
        ("/score", {"queries": "a", "documents": ["b"] * 2049}, "documents", "at most 2048 are al"),
        ("/score", {"queries": "a", "documents": [{"image": "b"}]}, "documents", "must be a text"),
        (
            "/score",
            {"queries": "a", "documents": {"content": [{"type": "image_url"}]}},
            "documents",
            "image_url",
        ),
        (
            "/score",
            {"queries": "a", "documents": "b" * 600},
            "documents",
            r"documents\[0\] has 601",
        ),
        (
            "/score",
            {"queries": "", "documents": "b", "add_special_tokens": False},
            "queries",
            r"queries\[0\] is empty",
        ),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("/rerank", {"query": "a", "documents": "b", "top_n": -1}, "top_n", "must be at least 0"),
        ("/rerank", {"query": "a", "documents": "b", "instruction": "x"}, "instruction", "not sup"),
    ],
)
async def test_mistakes_are_named(
    client: httpx.AsyncClient, path: str, body: Json, param: str, told: str
) -> None:
    error = error_of(await client.post(path, json=body), 400)
    assert error["param"] == param
    assert re.search(told, str(error["message"]))


def test_bodies_that_ask_for_nothing_more_are_no_error() -> None:
    neutral = {"queries": None, "padding": "do_not_pad", "instruction": None}
    assert ScoreBody.model_validate(neutral).queries == ()
    body = RerankBody.model_validate({"query": "a", "documents": "b", "top_n": 0})
    assert body.documents == ("b",)
