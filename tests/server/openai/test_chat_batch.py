"""Several conversations in one body, over HTTP."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.app import create_app
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of, eventually, serving

URL = "/v1/chat/completions/batch"
CHAT = "/v1/chat/completions"
HI, HO = ([{"role": "user", "content": text}] for text in ("hi", "ho, a prompt beyond a block"))
BODY = {"model": "alias", "messages": [HI, HO], "max_tokens": 50, "seed": 3}


async def test_each_conversation_has_the_choice_that_it_would_have_alone(
    client: httpx.AsyncClient,
) -> None:
    fields = {**BODY, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = (await client.post(URL, json=fields)).json()
    assert answer["object"] == "chat.completion"
    alone = [
        (await client.post(CHAT, json={**fields, "messages": messages})).json()
        for messages in (HI, HO)
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, one in zip(answer["choices"], alone, strict=True):
        assert {**choice, "index": 0} == one["choices"][0]
    for count in ("prompt_tokens", "completion_tokens"):
        assert answer["usage"][count] == sum(one["usage"][count] for one in alone)
    again = (await client.post(URL, json=fields)).json()
    details = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (again, *alone)]
    assert details[0] == sum(details[1:]) > 0


async def test_the_engine_is_asked_the_same_as_by_chats(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        await client.post(URL, json=BODY)
        for messages in (HI, HO):
            await client.post(CHAT, json={**BODY, "messages": messages})
    asked = [(request.prompt, request.params) for request in engine.seen]
    assert asked[:2] == asked[2:]
    assert engine.groups[0] is engine.groups[1], "they are admitted together"


async def test_an_answer_that_is_begun_is_continued(client: httpx.AsyncClient) -> None:
    begun = [*HI, {"role": "assistant", "content": "Well, "}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    answer = (await client.post(URL, json={**BODY, "messages": [begun], **fields})).json()
    assert answer["choices"][0]["message"]["content"].startswith("Well, You said")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HI}, "messages[0]"),
        ({"messages": [HI, []]}, "messages[1]"),
        ({"messages": [HI] * 1025}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": 100, "messages": [HI] * 1024}, None),
    ],
)
async def test_what_is_not_offered_is_refused(
    client: httpx.AsyncClient, fields: dict, param: str | None
) -> None:
    error = error_of(await client.post(URL, json={**BODY, **fields}), 400)
    if param is not None:
        assert error["param"] == param
    else:
        assert "524288" in error["message"], "the sum is bounded, too"


async def test_one_that_fails_ends_all(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.fail_after = 3
    error_of(await client.post(URL, json=BODY), 503)
    assert not engine.growing


async def test_a_client_that_leaves_ends_all(engine: FakeEngine) -> None:
    engine.gate.clear()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(URL, json=BODY, timeout=0.3)
        await eventually(lambda: len(engine.ended_early) == 2)


async def test_the_settings_are_prepared_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing as many tokens as a vocabulary has takes milliseconds each time."""
    pack, packed = np.packbits, []
    monkeypatch.setattr(
        np, "packbits", lambda bits, **order: packed.append(bits) or pack(bits, **order)
    )
    engine = FakeEngine()
    engine.tokenizer.generation_defaults = {"max_tokens": 450.0}  # more than the longer leaves room
    longer = [{"role": "user", "content": "x" * 100}]
    body = {"messages": [HI, longer, HO], "allowed_token_ids": list(range(97, 123))}
    async with client_for(engine) as client:
        assert (await client.post(URL, json=body)).status_code == 200
    assert len(packed) == 1
    assert len({request.params.max_tokens for request in engine.seen}) > 1


async def test_a_client_that_leaves_before_the_engine_is_asked_ends_that_too(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own template may take seconds for each conversation."""
    render, rendered = engine.tokenizer.render_chat, []
    monkeypatch.setattr(
        engine.tokenizer,
        "render_chat",
        lambda *args, **settings: rendered.append(args) or render(*args, **settings),
    )
    content = json.dumps({**BODY, "messages": [HI] * 200}).encode()
    messages = iter([{"type": "http.request", "body": content}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, object]:
        return next(messages)

    async def send(_: object) -> None:
        raise AssertionError("nobody is there to be answered")

    headers = {"host": "localhost", "content-type": "application/json"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": URL,
        "raw_path": URL.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
    }
    await create_app(engine, ServerConfig())(scope, receive, send)
    assert len(rendered) < 10
    assert not engine.seen
