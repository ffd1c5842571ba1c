"""prompt_embeds over HTTP; what a payload may hold is test_prompt_embeds.py's subject."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator

import httpx
import pytest
import torch

from lora_serve.prompts import EmbedsPrompt
from tests.fakes.engine import FakeEngine, fake_config
from tests.server.clients import client_for, error_of, events

URL = "/v1/completions"


def payload(num_tokens: int, value: float = 0.5) -> str:
    buffer = io.BytesIO()
    torch.save(torch.full((num_tokens, 8), value), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(fake_config(enable_prompt_embeds=True))


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine) as client:
        yield client


async def test_embeddings_are_continued_as_they_were_sent(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    response = await client.post(URL, json={"prompt_embeds": payload(3), "max_tokens": 50})
    answer = response.json()
    assert answer["choices"][0]["text"] == "You said: embeddings #0"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    prompt = engine.seen[0].prompt
    assert isinstance(prompt, EmbedsPrompt)
    assert torch.frombuffer(bytearray(prompt.data), dtype=torch.float32).tolist() == [0.5] * 24


async def test_embeddings_come_before_text(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    body = {"prompt": ["hi"], "prompt_embeds": [payload(1), payload(2, 1.5)], "max_tokens": 50}
    answer = (await client.post(URL, json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == [
        "You said: embeddings #0",
        "You said: embeddings #0",
        "You said: hi #0",
    ]
    assert answer["usage"]["prompt_tokens"] == 1 + 2 + 3
    response = await client.post(URL, json={**body, "stream": True})
    assert {chunk["choices"][0]["index"] for chunk in events(response.text)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"echo": True}, "Echo is unsupported with prompt embeds."),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not compatible with prompt embeds."),
    ],
)
async def test_what_needs_the_prompts_tokens_is_refused(
    client: httpx.AsyncClient, body: dict, message: str
) -> None:
    response = await client.post(URL, json={"prompt_embeds": payload(1), **body})
    assert error_of(response, 400)["message"] == message


@pytest.mark.parametrize("bad", ["", "not base64!", "AAAA", payload(513)])
async def test_a_payload_that_cannot_be_taken_is_a_400(client: httpx.AsyncClient, bad: str) -> None:
    error = error_of(await client.post(URL, json={"prompt_embeds": bad}), 400)
    assert error["param"] == "prompt_embeds"


async def test_embeddings_with_logprobs_have_those_of_the_answer(
    client: httpx.AsyncClient,
) -> None:
    body = {"prompt_embeds": payload(2), "logprobs": 1, "max_tokens": 2, "return_token_ids": True}
    choice = (await client.post(URL, json=body)).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["Y", "o"]
    assert choice["prompt_token_ids"] == []
