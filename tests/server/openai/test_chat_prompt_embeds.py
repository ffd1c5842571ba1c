"""Embeddings among the texts of a chat, over HTTP."""

from __future__ import annotations

import base64
import io
import json

import httpx
import pytest
import torch

from lora_serve.config import ServerConfig
from lora_serve.prompts import EmbedsPrompt, MixedPrompt, TokensPrompt
from tests.fakes.engine import FakeEngine, fake_config
from tests.fakes.tokenizer import TURN
from tests.server.clients import client_for, error_of, events

URL = "/v1/chat/completions"
Json = dict[str, object]


def payload(num_rows: int, value: float = 1.0) -> str:
    buffer = io.BytesIO()
    torch.save(torch.full((num_rows, 8), value), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def rows(num_rows: int, value: float = 1.0) -> EmbedsPrompt:
    values = torch.full((num_rows, 8), value)
    return EmbedsPrompt(num_rows, values.view(torch.uint8).numpy().tobytes())


def text(text: str) -> Json:
    return {"type": "text", "text": text}


def embeds(data: object) -> Json:
    return {"type": "prompt_embeds", "data": data}


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(fake_config(enable_prompt_embeds=True))


async def prompt_of(engine: FakeEngine, *messages: Json, **fields: object) -> object:
    async with client_for(engine) as client:
        response = await client.post(URL, json={"messages": list(messages), **fields})
    assert response.status_code == 200, response.text
    return engine.seen[-1].prompt


async def test_rows_stand_where_they_were_sent(engine: FakeEngine) -> None:
    prompt = await prompt_of(
        engine,
        user(text("a"), embeds(payload(3)), text("b"), embeds(payload(1, 2.0))),
        {"role": "assistant", "content": "c"},
        user(embeds(payload(2, 3.0))),
    )
    assert prompt == MixedPrompt.of(
        [
            [TURN, *b"user\na\n"],
            rows(3),
            b"\nb\n",
            rows(1, 2.0),
            [TURN, *b"assistant\nc", TURN, *b"user\n"],
            rows(2, 3.0),
            [TURN, *b"assistant\n"],
        ]
    )


async def test_a_stream_is_asked_for_the_same(engine: FakeEngine) -> None:
    message = user(text("a"), embeds(payload(3)))
    whole = await prompt_of(engine, message)
    assert await prompt_of(engine, message, stream=True) == whole
    async with client_for(engine) as client:
        body = {"messages": [message], "stream": True}
        chunks = events((await client.post(URL, json=body)).text)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_each_conversation_of_a_batch_has_its_own_rows(engine: FakeEngine) -> None:
    conversations = [[user(embeds(payload(1, value)))] for value in (1.0, 2.0)]
    alone = [await prompt_of(engine, *messages) for messages in conversations]
    async with client_for(engine) as client:
        response = await client.post(f"{URL}/batch", json={"messages": conversations})
    assert response.status_code == 200
    assert [request.prompt for request in engine.seen[-2:]] == alone


async def test_no_text_stands_for_rows(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the place of rows in a template is drawn for each request, after it was read."""
    seen: list[str] = []
    render = engine.tokenizer.render_chat

    def noting(messages: object, **given: object) -> str:
        seen.append(render(messages, **given))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(engine.tokenizer, "render_chat", noting)
    await prompt_of(engine, user(embeds(payload(1))))
    mark = seen[0].split("\n")[1].partition("\ue000")[0]
    assert len(mark) > 32
    prompt = await prompt_of(engine, user(text(mark), embeds(payload(1))))
    assert isinstance(prompt, MixedPrompt)
    assert mark not in seen[1].replace(mark, "", 1)
    assert bytes(prompt.token_ids[6 : 6 + len(mark)]) == mark.encode(), "it is text"
    assert isinstance(await prompt_of(engine, user(text(mark))), TokensPrompt)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "prompt_embeds"}, "without a string in `data`"),
        (embeds(None), "without a string in `data`"),
        (embeds(7), "without a string in `data`"),
        ({**embeds("AAAA"), "text": "a"}, "unknown fields"),
        (embeds("!"), "base64"),
        (embeds("AAAA"), "could not be deserialized"),
        (embeds(payload(513)), "513 rows"),
        ({"type": {}}, "only text parts and prompt_embeds"),
        ({"type": "image_url"}, "only text parts and prompt_embeds"),
    ],
)
async def test_bad_parts_are_400s(engine: FakeEngine, part: Json, words: str) -> None:
    async with client_for(engine) as client:
        body = {"messages": [user(text("a"), part)]}
        assert words in str(error_of(await client.post(URL, json=body), 400)["message"])
    assert not engine.seen


async def test_all_rows_together_fit_the_context(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        body = {"messages": [user(*[embeds(payload(300))] * 2)]}
        error = error_of(await client.post(URL, json=body), 400)
    assert "300 rows, more than" in str(error["message"])


async def test_a_conversation_has_at_most_as_many_parts_of_them_as_a_body_has_prompts(
    engine: FakeEngine,
) -> None:
    async with client_for(engine) as client:
        body = {"messages": [user(*[embeds("AAAA")] * 1000), user(*[embeds("AAAA")] * 25)]}
        error = error_of(await client.post(URL, json=body), 400)
        assert str(error["message"]).startswith("1025 parts with prompt_embeds are too many")
        body = {"messages": [user(*[embeds("AAAA")] * 1000), user(*[embeds("AAAA")] * 24)]}
        error = error_of(await client.post(URL, json=body), 400)
        assert "could not be deserialized" in str(error["message"]), "they are read"


@pytest.mark.parametrize(
    ("url", "fields", "words"),
    [
        (URL, {"prompt_logprobs": 1}, "not compatible"),
        (URL, {"echo": True}, "Echo is unsupported"),
        (URL, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (f"{URL}/render", {}, "are no tokens"),
        ("/tokenize", {}, "are no tokens"),
    ],
)
async def test_what_needs_tokens_is_refused(
    engine: FakeEngine, url: str, fields: Json, words: str
) -> None:
    async with client_for(engine) as client:
        body = {"messages": [user(text("a"), embeds(payload(3)))], **fields}
        assert words in str(error_of(await client.post(url, json=body), 400)["message"])


async def test_the_flag_is_needed(client: httpx.AsyncClient) -> None:
    async with client_for(FakeEngine()) as client:
        body = {"messages": [user(embeds(payload(1)))]}
        error = error_of(await client.post(URL, json=body), 400)
    assert "--enable-prompt-embeds" in str(error["message"])


async def test_a_template_that_drops_or_repeats_them_is_told_of(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for written in (lambda content: "", lambda content: content * 2):
        monkeypatch.setattr(
            engine.tokenizer,
            "render_chat",
            lambda messages, written=written, **_: written(messages[0]["content"]),
        )
        async with client_for(engine) as client:
            body = {"messages": [user(embeds(payload(1)))]}
            error = error_of(await client.post(URL, json=body), 400)
        assert "leaves out, repeats or moves" in str(error["message"])


async def test_large_bodies_are_taken_with_embeddings_alone(engine: FakeEngine) -> None:
    config = ServerConfig(max_body_bytes=2000, max_embeds_body_bytes=50_000)
    async with client_for(engine, config) as client:
        big = json.dumps({"messages": [user(text("a"), embeds(payload(50)))]})
        assert len(big) > 2000
        headers = {"Content-Type": "application/json"}
        assert (await client.post(URL, content=big, headers=headers)).status_code == 200
        plain = {"messages": [user(text("a" * 3000))]}
        error_of(await client.post(URL, json=plain), 413)
