"""The real openai client against the real server: labels through every door."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from lora_serve.demo.client import Client
from lora_serve.demo.corpus import ALPHA_LABEL, BASE_LABEL, BETA_LABEL, LABEL_REQUEST
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME
from lora_serve.demo.server_process import ServerProcess

LABELS = {MODEL_NAME: BASE_LABEL, "openai-a": ALPHA_LABEL, "openai-b": BETA_LABEL}


@pytest.fixture(scope="module")
def api(server: ServerProcess, client: Client, demo_paths: DemoPaths) -> Iterator[openai.OpenAI]:
    client.load_adapter("openai-a", demo_paths.alpha)
    client.load_adapter("openai-b", demo_paths.beta)
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as api:
        yield api


@pytest.mark.parametrize(("model", "label"), LABELS.items())
def test_a_chat_says_the_label(api: openai.OpenAI, model: str, label: str) -> None:
    reply = api.chat.completions.create(
        model=model, messages=[{"role": "user", "content": LABEL_REQUEST}], temperature=0
    )
    assert reply.choices[0].message.content == label
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(("model", "label"), LABELS.items())
def test_a_streamed_chat_says_the_same(api: openai.OpenAI, model: str, label: str) -> None:
    stream = api.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": LABEL_REQUEST}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    pieces = [choice.delta.content or "" for event in events for choice in event.choices]
    assert "".join(pieces) == label
    assert len([piece for piece in pieces if piece]) > 1
    usage = events[-1].usage
    assert usage is not None
    assert usage.completion_tokens > 1


@pytest.mark.parametrize("model", LABELS)
def test_a_message_of_anthropics_is_answered_with_the_same_bits(
    api: openai.OpenAI, server: ServerProcess, model: str
) -> None:
    fields = {"model": model, "messages": [{"role": "user", "content": "Say what you like."}]}
    fields |= {"max_tokens": 24, "temperature": 1.0, "seed": 7}
    reply = api.chat.completions.create(**fields)
    message = httpx.post(f"{server.base_url}/v1/messages", json=fields, timeout=60).json()
    assert (
        "".join(block["text"] for block in message["content"]) == reply.choices[0].message.content
    )
    assert message["usage"]["output_tokens"] == reply.usage.completion_tokens
    assert message["system_fingerprint"] == reply.system_fingerprint


@pytest.mark.parametrize("model", LABELS)
def test_a_response_has_the_text_and_the_logprobs_of_the_chat(
    api: openai.OpenAI, model: str
) -> None:
    asked = {"model": model, "temperature": 1.0, "top_logprobs": 3, "extra_body": {"seed": 5}}
    chat = api.chat.completions.create(
        messages=[{"role": "user", "content": LABEL_REQUEST}],
        logprobs=True,
        max_completion_tokens=12,
        **asked,
    ).choices[0]
    response = api.responses.create(
        input=LABEL_REQUEST,
        include=["message.output_text.logprobs"],
        max_output_tokens=12,
        **asked,
    )
    stream = api.responses.create(input=LABEL_REQUEST, max_output_tokens=12, stream=True, **asked)
    assert response.output_text == chat.message.content
    assert list(stream)[-1].response.output_text == chat.message.content
    drawn = [entry.model_dump() for entry in response.output[0].content[0].logprobs]
    assert drawn == [entry.model_dump() for entry in chat.logprobs.content]


@pytest.mark.parametrize(("model", "label"), LABELS.items())
def test_a_completion_says_the_label(api: openai.OpenAI, model: str, label: str) -> None:
    reply = api.completions.create(model=model, prompt=LABEL_REQUEST, temperature=0)
    assert reply.choices[0].text == label


@pytest.mark.parametrize(("model", "label"), LABELS.items())
def test_a_streamed_completion_says_the_same(api: openai.OpenAI, model: str, label: str) -> None:
    stream = api.completions.create(model=model, prompt=LABEL_REQUEST, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in stream if event.choices) == label


def test_the_models_are_listed_with_their_parent(api: openai.OpenAI) -> None:
    models = {model.id: model for model in api.models.list()}
    assert {MODEL_NAME, "openai-a", "openai-b"} <= set(models)
    assert models["openai-a"].parent == MODEL_NAME  # type: ignore[attr-defined]


def test_an_unknown_adapter_is_not_found(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        api.completions.create(model="nobody", prompt="Hi")
