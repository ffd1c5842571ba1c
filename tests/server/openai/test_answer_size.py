"""The product of choices, tokens and alternatives, each of which is within its own limit."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest

from lora_serve.server.openai.answer_size import MAX_ENTRIES
from lora_serve.step import TokenLogprobs
from tests.fakes.engine import FakeEngine, fake_config
from tests.fakes.tokenizer import VOCAB_SIZE
from tests.server.clients import client_for, error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [97] * 480, "max_tokens": 1}
CHATS = {"messages": [{"role": "user", "content": "a" * 400}], "max_tokens": 10}


@pytest.fixture
async def whole_vocabulary() -> AsyncIterator[httpx.AsyncClient]:
    """A server that tells as many alternatives as there are tokens."""
    engine = FakeEngine()
    model = dataclasses.replace(engine.config.model, max_logprobs=-1)
    engine.config = dataclasses.replace(engine.config, model=model)
    async with client_for(engine) as client:
        yield client


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (COMPLETIONS, LONG | {"n": 128, "echo": True, "logprobs": 20}),
        (COMPLETIONS, LONG | {"n": 128, "echo": True, "logprobs": 20, "stream": True}),
        (COMPLETIONS, LONG | {"n": 128, "prompt_logprobs": 20}),
        (COMPLETIONS, LONG | {"prompt": [[97] * 480] * 1024, "n": 2, "echo": True}),
        (COMPLETIONS, LONG | {"prompt": [[97]] * 512, "logprobs": 20, "max_tokens": 500}),
        (CHAT, CHATS | {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 200}),
    ],
)
async def test_a_product_of_what_is_asked_is_refused(
    client: httpx.AsyncClient, url: str, body: dict[str, object]
) -> None:
    error = error_of(await client.post(url, json=body), 400)
    assert error["param"] in ("n", "logprobs")
    assert f"at most {MAX_ENTRIES} are allowed; lower n, logprobs" in str(error["message"])


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (COMPLETIONS, LONG | {"echo": True, "logprobs": 20, "prompt_logprobs": 20}),
        (COMPLETIONS, LONG | {"n": 16, "echo": True, "logprobs": 20}),
        (COMPLETIONS, {"prompt": [[97]] * 512, "max_tokens": 2, "return_token_ids": True}),
        (CHAT, CHATS | {"n": 128}),
        (CHAT, CHATS | {"logprobs": True, "top_logprobs": 20}),
        (CHAT, CHATS | {"n": 128, "logprobs": True, "top_logprobs": 20, "stream": True}),
    ],
)
async def test_each_factor_alone_may_be_as_large_as_it_may(
    client: httpx.AsyncClient, url: str, body: dict[str, object]
) -> None:
    assert (await client.post(url, json=body)).status_code == 200


async def test_tokens_to_be_turned_into_text_are_counted(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post("/detokenize", json={"tokens": [97] * (2**17 + 1)}), 400)
    assert "tokens has 131073 ids, at most 131072 are allowed" in str(error["message"])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
async def test_the_whole_vocabulary_counts_as_many_as_it_has_wherever_it_is_asked_for(
    whole_vocabulary: httpx.AsyncClient, name: str
) -> None:
    params = {"max_tokens": 450, "n": 64, name: -1}
    nested = {"token_ids": [97] * 60, "sampling_params": params}
    for url, body, field in (
        ("/inference/v1/generate", nested, "sampling_params.n"),
        (COMPLETIONS, {"prompt": [97] * 60, **params}, "n"),
        (f"{COMPLETIONS}/render", {"prompt": [97] * 60, **params}, "n"),
    ):
        error = error_of(await whole_vocabulary.post(url, json=body), 400)
        assert error["param"] == field, url
        assert f"{name} {VOCAB_SIZE}" in str(error["message"])


async def test_a_step_of_a_stream_tells_no_more_than_a_whole_answer() -> None:
    """2,048 choices with 260 alternatives each, which one step may draw at once."""
    body = {"prompt": [[97]] * 16, "n": 128, "logprobs": -1, "stream": True}
    async with client_for(FakeEngine(fake_config(max_logprobs=-1))) as client:
        error = error_of(await client.post(COMPLETIONS, json=body), 400)
        assert f"at most {MAX_ENTRIES}" in str(error["message"])
        fewer = await client.post(COMPLETIONS, json={**body, "n": 1, "max_tokens": 1})
        assert fewer.status_code == 200


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "logprobs": 1}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "stream": True}),
        (CHAT, CHATS | {"logprobs": True, "top_logprobs": 1}),
        (CHAT, CHATS | {"logprobs": True, "top_logprobs": 1, "stream": True}),
        (
            "/v1/responses",
            {
                "input": "a",
                "max_output_tokens": 2,
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 1,
                "stream": True,
            },
        ),
    ],
)
async def test_many_alternatives_are_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, url: str, body: dict[str, object]
) -> None:
    many = tuple((97 + index % 26, -1.0) for index in range(6000))
    monkeypatch.setattr(
        "tests.fakes.engine.logprobs_at", lambda *_: TokenLogprobs(97, -1.0, 1, many)
    )
    engine = FakeEngine()
    name, threads = engine.tokenizer.token_text, Counter[bool]()

    def note(token_id: int) -> str:
        threads[threading.current_thread() is threading.main_thread()] += 1
        return name(token_id)

    monkeypatch.setattr(engine.tokenizer, "token_text", note)
    async with client_for(engine) as client:
        response = await client.post(
            url, json={**body, "max_tokens": 2} if url == COMPLETIONS else body
        )
    assert response.status_code == 200, response.text
    assert threads[False] >= 6000
    assert threads[True] < 100
