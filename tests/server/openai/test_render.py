"""What would be generated from, without generating."""

from __future__ import annotations

import httpx
import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import BOS, TURN
from tests.server.clients import client_for, error_of

HELLO = [{"role": "user", "content": "hi"}]


async def test_a_chat_is_rendered_as_it_would_be_continued(engine: FakeEngine) -> None:
    body = {"messages": HELLO, "temperature": 0.5, "stop": "x", "request_id": "r", "seed": 1}
    async with client_for(engine) as client:
        rendered = (await client.post("/v1/chat/completions/render", json=body)).json()
        assert not engine.seen
        await client.post("/v1/chat/completions", json=body)
    (asked,) = engine.seen
    assert rendered["token_ids"] == list(asked.prompt.token_ids)
    assert rendered["token_ids"].count(TURN) == 2
    assert rendered["prompt"] == "<turn>user\nhi<turn>assistant\n"
    assert (rendered["request_id"], rendered["model"]) == ("chatcmpl-r", "base/model")
    params = rendered["sampling_params"]
    for name in ("temperature", "top_p", "seed", "max_tokens", "n"):
        assert params[name] == getattr(asked.params, name)
    assert params["stop"] == ["x"]


async def test_each_prompt_is_rendered_in_its_place(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["ab", [99, 100]], "cache_salt": "s", "model": "alias", "request_id": "r"}
    first, second = (await client.post("/v1/completions/render", json=body)).json()
    assert first["token_ids"] == [BOS, 97, 98]
    assert (second["token_ids"], second["prompt"]) == ([99, 100], "cd")
    assert (first["request_id"], second["request_id"]) == ("cmpl-r-0", "cmpl-r-1")
    assert (first["cache_salt"], first["model"]) == ("s", "alias")
    assert first["sampling_params"]["max_tokens"] == 16


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"json_object": True}, {"json_object": True}),
    ],
)
async def test_a_constraint_is_told_by_vllms_name(
    client: httpx.AsyncClient, constraint: dict, told: dict
) -> None:
    body = {"prompt": "a", "structured_outputs": constraint}
    (rendered,) = (await client.post("/v1/completions/render", json=body)).json()
    assert rendered["sampling_params"]["structured_outputs"] == told


async def test_what_cannot_be_generated_is_not_rendered(client: httpx.AsyncClient) -> None:
    for body, status in (
        ({"prompt": "a", "temperature": 9}, 400),
        ({"prompt_embeds": "AAAA"}, 400),
        ({}, 400),
        ({"prompt": "a", "model": "nobody"}, 404),
    ):
        error_of(await client.post("/v1/completions/render", json=body), status)
    body = {"messages": HELLO, "model": "nobody"}
    error_of(await client.post("/v1/chat/completions/render", json=body), 404)


async def test_settings_that_would_be_told_too_often_are_refused(
    client: httpx.AsyncClient,
) -> None:
    body = {"structured_outputs": {"regex": "a" * 60_000}}
    fits = await client.post("/v1/completions/render", json={**body, "prompt": [[97]] * 64})
    assert fits.status_code == 200
    many = {**body, "prompt": [[97]] * 1024}
    error = error_of(await client.post("/v1/completions/render", json=many), 400)
    assert "at most 16777216 are allowed; send fewer prompts" in str(error["message"])
