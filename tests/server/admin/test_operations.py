from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import lora_serve
from lora_serve.identity import EVERYTHING
from tests.fakes.engine import FakeEngine, write_adapter
from tests.fakes.tokenizer import BOS
from tests.server.clients import error_of

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("method", "url"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
)
async def test_health_follows_the_engine(
    engine: FakeEngine, client: httpx.AsyncClient, method: str, url: str
) -> None:
    response = await client.request(method, url)
    assert (response.status_code, response.content) == (200, b"")
    engine.is_alive = False
    error_of(await client.request(method, url), 503)


async def test_the_version_is_the_packages(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": lora_serve.__version__}


async def test_the_prefix_cache_is_reset_for_all_or_for_one_adapter(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    url = "/reset_prefix_cache"
    for response in (
        await client.post(url),
        await client.post(url, json={}),
        await client.post(f"{url}?lora_name=tenant"),
        await client.post(url, json={"lora_name": "tenant"}),
    ):
        assert response.status_code == 200
        assert response.json() == {"success": True}
    assert engine.resets == [EVERYTHING, EVERYTHING, "tenant", "tenant"]


async def test_a_reset_that_met_running_requests_says_so(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.growing.add("a request")
    assert (await client.post("/reset_prefix_cache")).json() == {"success": False}


async def test_a_reset_of_what_is_not_there_is_refused(client: httpx.AsyncClient) -> None:
    error_of(await client.post("/reset_prefix_cache?lora_name=nobody"), 404)
    error = error_of(await client.post("/reset_prefix_cache?reset_external=true"), 400)
    assert error["param"] == "reset_external"


async def test_a_prompt_is_tokenized(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"prompt": "hi"})
    assert response.json() == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [BOS, 104, 105],
        "token_strs": None,
    }
    body = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == [104, 105]
    assert answer["token_strs"] == ["<104>", "<105>"]


async def test_a_conversation_is_tokenized_as_a_chat_would_see_it(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    answer = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
    await client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1})
    assert tuple(answer["tokens"]) == engine.seen[0].prompt.token_ids


async def test_tokens_are_turned_back(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/detokenize", json={"tokens": [BOS, 104, 105]})).json()
    assert answer == {"prompt": "<bos>hi"}


@pytest.mark.parametrize(
    ("url", "body", "words"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "either prompt or messages"),
        ("/tokenize", {"prompt": ["a"]}, "valid string"),
        ("/detokenize", {}, "tokens: this field is required"),
        ("/detokenize", {"tokens": [260]}, "is out of vocabulary: the model has 260 tokens"),
        ("/detokenize", {"tokens": [-1]}, "outside of [0"),
        ("/detokenize", {"tokens": ["a"]}, "list of token ids"),
    ],
)
async def test_what_cannot_be_tokenized_is_a_400(
    client: httpx.AsyncClient, url: str, body: dict, words: str
) -> None:
    assert words in error_of(await client.post(url, json=body), 400)["message"]


async def test_both_know_which_models_are_served(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    for url, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
        for model in ("base/model", "tenant", "alias:tenant", None):
            response = await client.post(url, json={"model": model, **body})
            assert response.status_code == 200
        error_of(await client.post(url, json={"model": "nobody", **body}), 404)
