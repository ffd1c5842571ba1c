from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from lora_serve.config import ServerConfig
from tests.fakes.engine import FakeEngine, write_adapter
from tests.fakes.tokenizer import BOS
from tests.server.clients import client_for, error_of

MESSAGES = [{"role": "user", "content": "hi"}]


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
        ("/tokenize", {"prompt": ["a"]}, "prompt: must be a string"),
        ("/detokenize", {}, "tokens: this field is required"),
        ("/detokenize", {"tokens": [260]}, "is out of vocabulary: the model has 260 tokens"),
        ("/detokenize", {"tokens": [-1]}, "ids are in [0, "),
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


async def test_the_tokenizer_is_described_where_a_flag_allows_it(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(enable_tokenizer_info_endpoint=True)) as client:
        answer = (await client.get("/tokenizer_info")).json()
    assert answer == {
        "tokenizer_class": "ByteTokenizer",
        "vocab_size": 260,
        "model_max_length": 512,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": None,
        "unk_token": None,
        "additional_special_tokens": ["<turn>"],
        "added_tokens_decoder": {
            str(BOS + i): {"content": text, "special": True}
            for i, text in enumerate(("<bos>", "<eos>", "<turn>"))
        },
        "chat_template": None,
    }


async def test_without_the_flag_nothing_of_the_tokenizer_is_shown(
    client: httpx.AsyncClient,
) -> None:
    words = "--enable-tokenizer-info-endpoint"
    assert words in error_of(await client.get("/tokenizer_info"), 404)["message"]


async def test_an_adapters_name_is_looked_up_without_a_list_of_all_adapters(
    engine: FakeEngine,
    client: httpx.AsyncClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))

    async def list_all() -> None:
        raise AssertionError("all adapters were listed")

    monkeypatch.setattr(engine, "list_adapters", list_all)
    answer = await client.post("/tokenize", json={"model": "tenant", "prompt": "hi"})
    assert answer.status_code == 200
