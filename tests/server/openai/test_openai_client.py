"""The client that people really use, over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from lora_serve.config import ServerConfig
from tests.fakes.engine import FakeEngine, logprob_of, write_adapter
from tests.server.clients import serving

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def api(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(engine, ServerConfig(api_key=("key",))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as api,
    ):
        yield api


async def test_completions(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(
        model="base/model", prompt=["hi", "ho"], n=2, max_tokens=50, logprobs=1, seed=3, stop=["§"]
    )
    assert [choice.text for choice in answer.choices] == [
        "You said: hi #0",
        "You said: hi #1",
        "You said: ho #0",
        "You said: ho #1",
    ]
    assert answer.choices[0].logprobs.token_logprobs[0] == logprob_of(0, ord("Y"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.system_fingerprint == "ab" * 6


async def test_streamed_completions(api: openai.AsyncOpenAI) -> None:
    stream = await api.completions.create(
        model="base/model",
        prompt="hi",
        max_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == "You said: hi #0"
    assert chunks[-1].usage.completion_tokens == 15


async def test_chat(api: openai.AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(
        model="base/model",
        messages=HELLO,
        max_completion_tokens=50,
        logprobs=True,
        top_logprobs=2,
        user="me",
        metadata={"a": "b"},
        extra_body={"top_k": 5, "cache_salt": "s"},
    )
    message = answer.choices[0].message
    assert message.content == "You said: user\nhiassistant\n #0"
    assert answer.choices[0].logprobs.content[0].logprob == logprob_of(0, ord("Y"))
    again = await api.chat.completions.create(
        model="base/model", messages=[*HELLO, message.model_dump(), *HELLO], max_tokens=1
    )
    assert again.choices[0].finish_reason == "length"


async def test_streamed_chat(api: openai.AsyncOpenAI) -> None:
    stream = await api.chat.completions.create(model="base/model", messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert text == "You said: user\nhiassistant\n #0"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models(engine: FakeEngine, api: openai.AsyncOpenAI, tmp_path: Path) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    assert [model.id async for model in api.models.list()] == ["base/model", "alias", "tenant"]
    assert (await api.models.retrieve("base/model")).id == "base/model"
    assert (await api.models.retrieve("tenant")).parent == "base/model"


async def test_errors_are_the_clients_own_kinds(
    engine: FakeEngine, api: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `nobody` does not exist"):
        await api.completions.create(model="nobody", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="temperature must be in") as caught:
        await api.completions.create(model="base/model", prompt="hi", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        await api.with_options(api_key="wrong").models.list()
    engine.fail_after = 0
    with pytest.raises(openai.InternalServerError, match="engine process has died"):
        await api.completions.create(model="base/model", prompt="hi", stream=True)


async def test_an_error_in_the_middle_of_a_stream_is_raised(
    engine: FakeEngine, api: openai.AsyncOpenAI
) -> None:
    engine.fail_after = 2
    stream = await api.chat.completions.create(model="base/model", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="engine process has died"):
        async for _ in stream:
            pass
