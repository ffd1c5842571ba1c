"""The product of choices, tokens and alternatives, each of which is within its own limit."""

from __future__ import annotations

import httpx
import pytest

from lora_serve.server.openai.answer_size import MAX_ENTRIES
from tests.server.clients import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [97] * 480, "max_tokens": 1}
CHATS = {"messages": [{"role": "user", "content": "a" * 400}], "max_tokens": 10}


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
